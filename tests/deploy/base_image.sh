#!/usr/bin/env bash
# Makes a stand-in for python:3.11-slim-bookworm out of Debian's packages, for machines that reach no image registry.
# Needs root, debootstrap and a running Docker engine. pip's settings of this machine, and the folders that they name, go
# in at the same paths, so that `docker build --network=host` finds the same packages. Usage: base_image.sh [TAG]
set -euo pipefail

tag=${1:-python:3.11-slim-bookworm}
rootfs=$(mktemp -d)
trap 'rm -rf "$rootfs"' EXIT

debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv bookworm "$rootfs" >/dev/null
rm -rf "$rootfs"/var/cache/apt/archives/*.deb "$rootfs"/var/lib/apt/lists/*

copy() { # a file or folder, to the same path
  if [ -e "$1" ]; then
    mkdir -p "$rootfs$(dirname "$1")"
    cp -a "$1" "$rootfs$(dirname "$1")/"
  fi
}
copy /etc/ssl/certs/ca-certificates.crt
for settings in /etc/pip.conf /etc/xdg/pip "$HOME/.config/pip" "$HOME/.pip"; do copy "$settings"; done
# Only folders of wheels: an index on disk may be huge, and pip passes over one that is missing.
for folder in $({ python3 -m pip config list; env; } | sed -nE "s/.*find[-_]links=//Ip" | tr -d "'"); do
  if [ -d "$folder" ]; then copy "$folder"; fi
done

tar -C "$rootfs" -c . | docker import --change 'CMD ["python3"]' - "$tag"
