#!/bin/sh
# Make a folder with Python, NumPy and Numba for arm64, in which the extended tests run compiled passes by Arm's instructions.
# sh tests/support/make_arm_root.sh FOLDER, as root on Debian 12; then `VARGEN_ARM_ROOT=FOLDER make test-extended`.
set -eu
root=$1
mkdir -p "$root/debs" "$root/wheels" "$root/site" "$root/proc"
apt-get update -qq
apt-get install -qq -y qemu-user

had=$(dpkg --print-foreign-architectures | grep -x arm64 || true)
[ -n "$had" ] || trap 'dpkg --remove-architecture arm64; apt-get update -qq' EXIT
dpkg --add-architecture arm64
apt-get update -qq
(
    cd "$root/debs"
    for name in python3.11-minimal libpython3.11-minimal libpython3.11-stdlib libc6 libgcc-s1 libstdc++6 libgomp1 libexpat1 \
        zlib1g libssl3 libffi8 libbz2-1.0 liblzma5 libsqlite3-0 libuuid1 libcrypt1 libatomic1; do
        apt-get download -qq -o APT::Sandbox::User=root "$name:arm64"
    done
)
for package in "$root"/debs/*.deb; do dpkg -x "$package" "$root"; done

python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.11 --implementation cp \
    --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 --constraint "$(dirname "$0")/../../constraints.txt" \
    --dest "$root/wheels" numpy numba llvmlite
for wheel in "$root"/wheels/*.whl; do python3 -m zipfile -e "$wheel" "$root/site"; done
rm -r "$root/debs" "$root/wheels"

# The emulator shows the host's flags, unless this file is there: those of a CPU that LLVM does not know by name.
printf 'processor\t: 0\nFeatures\t: fp asimd asimddp\nCPU implementer\t: 0x00\n' >"$root/proc/cpuinfo"
