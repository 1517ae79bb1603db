#!/bin/sh
# Redeem the invitation on the first start, then train on RANKS processes (one per GPU). A restart keeps the identity and
# resumes from the last checkpoint.
set -eu
: "${HOME_DIR:=/home/edit/peer}" "${INVITATIONS:=/invitations}" "${NAME:?NAME names this peer, as in PEERS of the coordinator}" "${DATA:=/data}" "${RANKS:=1}"
if [ ! -f "$HOME_DIR/identity.json" ]; then
    edit-peer join "$(cat "$INVITATIONS/$NAME")" --home "$HOME_DIR"
fi
if [ "$RANKS" -gt 1 ]; then
    exec torchrun --standalone --nproc-per-node "$RANKS" --max-restarts 100 -m peers run --home "$HOME_DIR" --data "$DATA" "$@"
fi
exec edit-peer run --home "$HOME_DIR" --data "$DATA" "$@"
