#!/bin/sh
# Prepares a directory with the Azure clients and the storage servers that the tests drive: setup.sh DIR
# Then: POSTRIDER_CLIENTS=DIR cargo test -p postrider --test it azure_clients
#   or: POSTRIDER_CLIENTS=DIR cargo test -p postrider-blobs
# Does nothing to what is there already in the right version.
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
directory=${1:?usage: setup.sh DIR}
mkdir -p "$directory"
directory=$(CDPATH='' cd -- "$directory" && pwd)

# venv NAME REQUIREMENTS: a Python environment of its own; az pins other versions than the SDKs have.
venv() {
    if ! "$directory/$1/bin/python" -m pip --version >/dev/null 2>&1; then
        rm -rf "${directory:?}/$1"
        python3 -m venv "$directory/$1"
    fi
    if ! cmp -s "$here/python/$2" "$directory/$1/requirements.txt"; then
        "$directory/$1/bin/python" -m pip install --quiet --disable-pip-version-check -r "$here/python/$2"
        cp "$here/python/$2" "$directory/$1/requirements.txt"
    fi
}
venv venv requirements.txt
venv az az-requirements.txt

mkdir -p "$directory/js"
if ! cmp -s "$here/js/package.json" "$directory/js/package.json" ||
    [ ! -d "$directory/js/node_modules/@azure/arm-eventgrid" ] || [ ! -d "$directory/js/node_modules/azurite" ]; then
    rm -f "$directory/js/package.json"
    cp "$here/js/package.json" "$directory/js/package.json.new"
    mv "$directory/js/package.json.new" "$directory/js/package.json"
    if ! (cd "$directory/js" && npm install --no-package-lock --no-audit --no-fund --silent); then
        rm -f "$directory/js/package.json"
        exit 1
    fi
fi
echo "ready: POSTRIDER_CLIENTS=$directory"
