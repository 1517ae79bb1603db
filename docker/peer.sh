#!/bin/sh
# Redeems the invitation on the first start, then trains. A restart keeps the identity and continues.
set -eu
: "${HOME_DIR:=/home/edit/peer}" "${INVITATIONS:=/invitations}" "${NAME:?NAME names this peer, as in PEERS of the coordinator}" "${DATA:=/data}"
if [ ! -f "$HOME_DIR/identity.json" ]; then
    edit-peer join "$(cat "$INVITATIONS/$NAME")" --home "$HOME_DIR"
fi
exec edit-peer run --home "$HOME_DIR" --data "$DATA" "$@"
