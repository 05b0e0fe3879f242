#!/bin/bash
# Builds Enroot and the Pyxis plugin from source trees that you have, for the Slurm of this machine:
#   tests/containers/enroot_and_pyxis.sh ENROOT_SOURCE PYXIS_SOURCE PREFIX
# Then PATH=PREFIX/bin:$PATH finds enroot, and PREFIX/plugstack.conf loads Pyxis:
#   verl-slurm devcluster start --plugstack PREFIX/plugstack.conf
# It needs gcc, make, and Debian's libslurm-dev, libbsd-dev, squashfs-tools, squashfuse, fuse-overlayfs and jq.
set -euo pipefail
enroot=$(realpath -e -- "${1:?ENROOT_SOURCE}") pyxis=$(realpath -e -- "${2:?PYXIS_SOURCE}")
mkdir -p -- "${3:?PREFIX}"
prefix=$(realpath -e -- "$3")
build=$(mktemp -d)
trap 'rm -rf -- "$build"' EXIT
cp -r -- "$enroot" "$build/enroot"
cp -r -- "$pyxis" "$build/pyxis"

# Enroot's own Makefile wants submodules (musl, makeself) for bundles and static binaries, which nothing here needs.
mkdir -p "$prefix"/{bin,lib/enroot,run,etc/enroot/{environ.d,hooks.d,mounts.d}}
cd "$build/enroot"
for name in aufs2ovlfs mksquashovlfs mount nsenter switchroot; do
    gcc -std=c99 -O2 -Ideps/libbsd/include -o "$prefix/bin/enroot-$name" "bin/enroot-$name.c" -l:libbsd.a -lmd
done
version=$(sed -n 's/^VERSION *:= *//p' Makefile)
sed -e "s;@sysconfdir@;$prefix/etc/enroot;" -e "s;@libdir@;$prefix/lib/enroot;" -e "s;@version@;$version;" \
    enroot.in >"$prefix/bin/enroot"
chmod 755 "$prefix/bin/enroot"
install -m 644 src/*.sh "$prefix/lib/enroot"
install -m 755 conf/hooks/*.sh "$prefix/etc/enroot/hooks.d"
install -m 644 conf/mounts/*.fstab "$prefix/etc/enroot/mounts.d"
install -m 644 conf/environ/*.env "$prefix/etc/enroot/environ.d"

make -s -C "$build/pyxis"
install -m 644 "$build/pyxis/spank_pyxis.so" "$prefix/lib"
echo "required $prefix/lib/spank_pyxis.so runtime_path=$prefix/run" >"$prefix/plugstack.conf"
echo "enroot $version and pyxis are in $prefix"
