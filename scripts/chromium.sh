#!/usr/bin/env bash
# Prints the path of a Chromium (or Chrome) for the tests of the report; installs Debian's where there is none.
#
#   scripts/chromium.sh            find one, or install one (apt-get, as root or with sudo)
#   scripts/chromium.sh --find     find one, or fail
#
# KLAMP_CHROMIUM names one that is somewhere else.
set -euo pipefail

find_browser() {
  local name
  for name in "${KLAMP_CHROMIUM:-}" chromium chromium-browser google-chrome google-chrome-stable; do
    if [ -n "$name" ] && command -v "$name" 2>/dev/null; then
      return 0
    fi
  done
  return 1
}

fail() {
  echo "The tests of the report need a browser: $1" >&2
  echo "Install Chromium or Chrome (Debian: apt-get install chromium), or set KLAMP_CHROMIUM to its path." >&2
  exit 1
}

if find_browser; then
  exit 0
fi
[ "${1:-}" != "--find" ] || fail "none was found."
command -v apt-get >/dev/null || fail "none was found, and there is no apt-get to install one with."

as_root=()
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || fail "none was found, and installing one needs root."
  as_root=(sudo -n)
fi
export DEBIAN_FRONTEND=noninteractive
{
  "${as_root[@]}" apt-get update -qq
  "${as_root[@]}" apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core
} >&2 || fail "apt-get could not install chromium."
find_browser || fail "apt-get installed chromium, but it is not in the PATH."
