#!/bin/sh
# Create the run on the first start, write one invitation per name in PEERS, then serve. A restart continues the run.
set -eu
: "${STATE:=/state}" "${INVITATIONS:=/invitations}" "${CONFIG:=/config/run.toml}" "${PEERS:=peer-1 peer-2}"
if [ ! -f "$STATE/run.json" ]; then
    edit-coordinator init --state "$STATE" --config "$CONFIG"
fi
for name in $PEERS; do
    if [ ! -s "$INVITATIONS/$name" ]; then
        invitation=$(edit-coordinator invite --state "$STATE" "$name")
        (umask 077 && printf '%s\n' "$invitation" | head -n 1 > "$INVITATIONS/.$name")
        mv "$INVITATIONS/.$name" "$INVITATIONS/$name"
    fi
done
exec edit-coordinator serve --state "$STATE"
