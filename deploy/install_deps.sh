#!/usr/bin/env bash
# Installs the Debian packages of deploy/packages.txt that are missing, and says which.
#   deploy/install_deps.sh build        what building and running needs
#   deploy/install_deps.sh build test   and what the tests need
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
want=()
for group in "$@"; do
  while read -r g p; do [ "$g" = "$group" ] && want+=("$p"); done < <(grep -v '^#' "$here/packages.txt")
done
missing=()
for p in "${want[@]}"; do
  dpkg-query -W -f='${Status}' "$p" 2>/dev/null | grep -q 'ok installed' || missing+=("$p")
done
if [ ${#missing[@]} -eq 0 ]; then
  echo "packages: all ${#want[@]} present"
  exit 0
fi
echo "packages: installing ${#missing[@]} of ${#want[@]}: ${missing[*]}"
sudo=""
if [ "$(id -u)" != 0 ]; then
  command -v sudo >/dev/null || { echo "error: not root and no sudo; as root run: apt-get install ${missing[*]}" >&2; exit 3; }
  sudo=sudo
fi
# Daemons of packages (prometheus) must not start by themselves: the scripts start their own.
export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
$sudo apt-get update -qq
$sudo env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
echo "packages: done"
