#!/bin/sh
# Prepares a directory with the Azure clients, the storage servers and the browser's driver that the tests use: setup.sh DIR
# Then: POSTRIDER_CLIENTS=DIR cargo test -p postrider --test it azure_clients
#   or: POSTRIDER_CLIENTS=DIR cargo test -p postrider --test it portal
#   or: POSTRIDER_CLIENTS=DIR cargo test -p postrider-blobs
#   or: POSTRIDER_CLIENTS=DIR cargo test -p postrider-jetstream
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
venv openapi openapi-requirements.txt

mkdir -p "$directory/js"
if ! cmp -s "$here/js/package.json" "$directory/js/package.json" ||
    [ ! -d "$directory/js/node_modules/@azure/arm-eventgrid" ] || [ ! -d "$directory/js/node_modules/azurite" ] ||
    [ ! -d "$directory/js/node_modules/playwright-core" ] || [ ! -d "$directory/js/node_modules/axe-core" ]; then
    rm -f "$directory/js/package.json"
    cp "$here/js/package.json" "$directory/js/package.json.new"
    mv "$directory/js/package.json.new" "$directory/js/package.json"
    if ! (cd "$directory/js" && npm install --no-package-lock --no-audit --no-fund --silent); then
        rm -f "$directory/js/package.json"
        exit 1
    fi
fi

# The portal is tested in the browser of this machine: one that is there, or else the distribution's.
has_browser() {
    for name in chromium chromium-browser google-chrome google-chrome-stable; do
        if command -v "$name" >/dev/null 2>&1; then return 0; fi
    done
    return 1
}
if ! has_browser && [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null 2>&1; then
    apt-get install -y --no-install-recommends chromium || { apt-get update && apt-get install -y --no-install-recommends chromium; } || true
fi
if ! has_browser; then
    echo "setup.sh: no browser is on PATH; install chromium or google-chrome (Debian: apt-get install chromium) to test the portal" >&2
    exit 1
fi
echo "ready: POSTRIDER_CLIENTS=$directory"
