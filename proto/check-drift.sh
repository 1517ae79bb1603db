#!/bin/sh
# Fails when the committed stubs are not what protoc makes of the .proto files.
set -eu
cd "$(dirname "$0")"
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
python -m grpc_tools.protoc -I . --python_out="$fresh" --pyi_out="$fresh" --grpc_python_out="$fresh" editpb/*.proto
for made in "$fresh"/editpb/*; do
    cmp -s "$made" "editpb/$(basename "$made")" || { echo "stub drift: proto/editpb/$(basename "$made"); run: make stubs" >&2; exit 1; }
done
