#!/bin/sh
# Installs what the tests need beside .venv: redis-server, for state that routers share; Chromium, for the
# dashboard; ip, for several hosts; and LlamaIndex, which needs an older openai and so an environment of its own.
set -eu
cd "$(dirname "$0")/.."

llama_index() {
    pins=requirements/llamaindex.txt environment=.venv/llama-index
    cmp -s $pins $environment/installed && return
    echo "Installing LlamaIndex"
    test -x $environment/bin/python || .venv/bin/python -m venv $environment
    $environment/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $pins
    cp $pins $environment/installed
}

# program NAME PACKAGE COMMAND...: install a Debian package unless one of its commands is there.
program() {
    name=$1 package=$2
    shift 2
    for each; do
        command -v "$each" >/dev/null && return
    done

    if ! command -v apt-get >/dev/null; then
        echo "The tests need $name on the PATH, and there is no apt-get to install it." >&2
        exit 1
    fi
    if [ "$(id -u)" -eq 0 ]; then
        as_root=""
    elif sudo -n true 2>/dev/null; then
        as_root="sudo -n"
    else
        echo "The tests need $name on the PATH. Install it as root: apt-get install $package" >&2
        exit 1
    fi

    echo "Installing $package"
    $as_root apt-get update -qq
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "$package" >/dev/null
}

program "redis-server (6.2 or newer)" redis-server redis-server
program "Chromium" chromium chromium chromium-browser google-chrome
program "ip (iproute2)" iproute2 ip
llama_index
