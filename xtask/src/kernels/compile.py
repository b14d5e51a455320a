"""Compiles the CUDA kernels with NVRTC and says what each costs. Run by `cargo xtask kernels`, in its own environment.

    compile.py KERNELS [--library FILE] [--only NAME ...] [--check] [--architecture A ...] [--code-to FOLDER]

Without --check the code goes to KERNELS/built, named after the unit, the architecture and the digest of its sources;
older files there are removed. A unit whose first lines say `// architectures: sm_90a` is built for those alone.
"""

import argparse
import ctypes
import glob
import os
import re
import sys
import zlib

ARCHITECTURES = ["sm_80", "sm_90", "compute_80"]
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.M)
ONLY_FOR = re.compile(r"^// architectures: (.+)$", re.M)


def digest(unit, headers, texts, flags):
    """FNV-1a over the flags and the sources; crates/cuda/build.rs computes the same."""
    value = 0xCBF29CE484222325
    for part in [" ".join(flags), *(texts[name] for name in [unit, *headers])]:
        for byte in part.encode() + b"\0":
            value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return f"{value:016x}"


def headers_of(unit, texts):
    """Names of everything that a unit includes, sorted."""
    found, waiting = set(), [unit]
    while waiting:
        for name in INCLUDE.findall(texts[waiting.pop()]):
            if name not in texts:
                sys.exit(f"{unit}: includes {name}, which is not in kernels/ (paths start there)")
            if name not in found:
                found.add(name)
                waiting.append(name)
    return sorted(found)


class Nvrtc:
    """The library's calls."""

    def __init__(self, path):
        folder = os.path.dirname(path)
        for helper in glob.glob(os.path.join(folder, "libnvrtc-builtins*.so*")):
            ctypes.CDLL(helper, mode=ctypes.RTLD_GLOBAL)
        self.library = ctypes.CDLL(path)
        self.library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def version(self):
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.check(self.library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        return f"{major.value}.{minor.value}"

    def check(self, code):
        if code:
            raise RuntimeError(self.library.nvrtcGetErrorString(code).decode())

    def text(self, program, kind):
        size = ctypes.c_size_t()
        self.check(getattr(self.library, f"nvrtcGet{kind}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self.check(getattr(self.library, f"nvrtcGet{kind}")(program, buffer))
        return buffer.raw

    def compile(self, unit, headers, texts, architecture, flags):
        """The code and the log, or None and the log."""
        names = (ctypes.c_char_p * max(1, len(headers)))(*(h.encode() for h in headers))
        bodies = (ctypes.c_char_p * max(1, len(headers)))(*(texts[h].encode() for h in headers))
        program = ctypes.c_void_p()
        self.check(
            self.library.nvrtcCreateProgram(
                ctypes.byref(program), texts[unit].encode(), unit.encode(), len(headers), bodies, names
            )
        )
        flags = [f"--gpu-architecture={architecture}", *flags]
        virtual = architecture.startswith("compute")
        if not virtual:
            flags.append("--ptxas-options=-v")
        options = (ctypes.c_char_p * len(flags))(*(f.encode() for f in flags))
        failed = self.library.nvrtcCompileProgram(program, len(flags), options)
        log = self.text(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
        code = None
        if not failed:
            code = self.text(program, "PTX").rstrip(b"\0") if virtual else self.text(program, "CUBIN")
        self.library.nvrtcDestroyProgram(ctypes.byref(program))
        return code, log


def costs(log):
    """(kernel, registers, shared bytes, spilled bytes, stack bytes) of each entry of a log."""
    entry, stack, spilled, found = None, 0, 0, []
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '(\w+)'", line):
            entry, stack, spilled = match[1], 0, 0
        if match := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            stack, spilled = int(match[1]), int(match[2]) + int(match[3])
        if (match := re.search(r"Used (\d+) registers", line)) and entry:
            shared = re.search(r"(\d+) bytes smem", line)
            found.append((entry, int(match[1]), int(shared[1]) if shared else 0, spilled, stack))
            entry = None
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("kernels")
    parser.add_argument("--library", required=True)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--architecture", action="append", default=[])
    parser.add_argument("--code-to")
    options = parser.parse_args()
    texts = {}
    for path in glob.glob(os.path.join(options.kernels, "**", "*.cu*"), recursive=True):
        if path.endswith((".cu", ".cuh")):
            with open(path, encoding="utf-8") as file:
                texts[os.path.relpath(path, options.kernels).replace(os.sep, "/")] = file.read()
    with open(os.path.join(options.kernels, "flags.txt"), encoding="utf-8") as file:
        flags = file.read().split()
    units = sorted(name for name in texts if name.endswith(".cu"))
    if options.only:
        missing = [name for name in options.only if name not in units]
        if missing:
            sys.exit(f"no such unit: {', '.join(missing)}; there are {', '.join(units)}")
        units = [name for name in units if name in options.only]
    nvrtc = Nvrtc(options.library)
    print(f"NVRTC {nvrtc.version()}")
    built = os.path.join(options.kernels, "built")
    wanted, bad = set(), 0
    for unit in units:
        headers = headers_of(unit, texts)
        stamp = digest(unit, headers, texts, flags)
        only_for = ONLY_FOR.search(texts[unit])
        architectures = only_for[1].split(", ") if only_for else ARCHITECTURES
        for architecture in options.architecture or architectures:
            name = f"{unit[:-3]}-{architecture}-{stamp}.z"
            wanted.add(name)
            kept = os.path.join(built, name)
            if not options.check and os.path.exists(kept):
                continue
            code, log = nvrtc.compile(unit, headers, texts, architecture, flags)
            listed = costs(log)
            warnings = [l for l in log.splitlines() if "warning" in l or "error" in l]
            if code is None:
                print(log)
                bad += 1
                continue
            for line in warnings:
                print(line)
            for kernel, registers, shared, spilled, stack in listed:
                print(f"{unit:24} {architecture:7} {kernel:40} {registers:4} registers {shared:6} shared "
                      f"{stack:5} stack {spilled:5} spilled")
                bad += spilled > 0
            if options.code_to:
                with open(os.path.join(options.code_to, name[:-2]), "wb") as file:
                    file.write(code)
            if not options.check:
                os.makedirs(built, exist_ok=True)
                with open(kept, "wb") as file:
                    file.write(zlib.compress(code, 9))
    if not options.check and not options.only and not options.architecture and os.path.isdir(built):
        for name in sorted(set(os.listdir(built)) - wanted):
            os.remove(os.path.join(built, name))
    if bad:
        sys.exit(f"{bad} units or kernels do not compile or spill registers")


main()
