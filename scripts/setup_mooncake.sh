#!/bin/sh
# Installs Mooncake Store, where that can be had: its package into .venv and, as root on a Debian system, the
# libraries that it loads. Says in a sentence what is missing otherwise; the tests and benchmarks of it then skip.
set -u
cd "$(dirname "$0")/.."
works() { .venv/bin/python -c 'import mooncake.store' 2>/dev/null; }

if ! .venv/bin/python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("mooncake") is None)'; then
    echo "setup: installing the mooncake extra"
    # Its own requirements are vLLM's too, and those stay as they are.
    .venv/bin/python -m pip install -qq --disable-pip-version-check --no-deps 'mooncake-transfer-engine-non-cuda>=0.3.13' ||
        { echo "setup: Mooncake's package can't be had here; what needs it is skipped"; exit 1; }
fi
works && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "setup: installing the libraries that Mooncake loads"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq libibverbs1 libnuma1 libcurl4; } >/dev/null
fi
works || { echo "setup: Mooncake needs libibverbs, libnuma and libcurl (Debian: libibverbs1 libnuma1 libcurl4); what needs it is skipped"; exit 1; }
