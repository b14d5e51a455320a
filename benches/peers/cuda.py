#!/usr/bin/env python3
"""Every speed figure of a CUDA device in one run: Flint's own beside their floors, and what else a user could pick there.

usage: cuda.py --flint FLINT [--work DIR] [--disk DIR] [--out DIR] [--no-full] [--no-peers] [--llama SOURCE] [--wheels DIR]
               [--gpu GPU --sanitize] [--budget SECONDS] [--dry]

Writes results.jsonl (a record a line, as they come) and logs to --out, and prints a table (cuda_report.py) at the end.
Checkpoints are synthetic, with the release's layer widths. Needs Python 3.11 with numpy; ncu, torch, fla-core,
transformers, cmake, ninja and nvcc only for the parts that use them: what is missing is skipped and said so.
Peers are built and files are written in the background; those processes stand still while something is timed.
"""
import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import cuda_report
from cuda_tools import Jobs, Results, build_tracer, drop_cached, profile_of, read_rate, steps_of

HERE = Path(__file__).resolve().parent
PYTHON = sys.executable
FOUR_BITS = ["--format", "mlx", "--bits", "4", "--expert-bits", "4", "--head-bits", "4"]
TWO_BIT_EXPERTS = ["--format", "mlx", "--bits", "8", "--expert-bits", "2", "--head-bits", "8", "--hole-experts"]


class Bench:
    def __init__(self, asked):
        self.asked = asked
        self.work = Path(asked.work or tempfile.mkdtemp(prefix="flint-cuda-")).resolve()
        self.disk = Path(asked.disk).resolve() if asked.disk else self.work
        self.out = Path(asked.out).resolve()
        for folder in (self.work, self.disk, self.out):
            folder.mkdir(parents=True, exist_ok=True)
        self.results = Results(self.out / "results.jsonl")
        self.jobs = Jobs(self.out)
        self.end = time.monotonic() + asked.budget
        # cmake and ninja may lie beside the interpreter.
        paths = os.pathsep.join([os.path.dirname(PYTHON), os.environ.get("PATH", "")])
        self.environment = dict(os.environ, PYTHONUNBUFFERED="1", PATH=paths)

    def left(self):
        return max(0.0, self.end - time.monotonic())

    def run(self, name, command, limit=None, environment=None, cwd=None):
        """Runs a command to its end; its standard output, or None when it failed, which is recorded."""
        limit = min(limit or self.left(), self.left())
        if limit < 3:
            self.results.add("skipped", stage=name, why="no time left")
            return None
        log = self.out / f"{name}.log"
        began = time.monotonic()
        try:
            with open(log, "w") as errors:
                process = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, stderr=errors, text=True,
                                           env=environment or self.environment, cwd=cwd, process_group=0)
            try:
                said, _ = process.communicate(timeout=limit)
            finally:
                # A profiler or checker leaves its own child behind when it is ended.
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            if process.returncode == 0:
                return said
            why = f"status {process.returncode}: {(said[-300:] + log.read_text()[-700:]).strip()}"
        except subprocess.TimeoutExpired:
            why = f"still running after {time.monotonic() - began:.0f} s"
        except OSError as error:
            why = str(error)
        self.results.add("failed", stage=name, why=why)
        return None

    def flint(self, name, folder, *options, wrapper=(), limit=None):
        """A run of `flint bench`, recorded."""
        device = ["--device", "cpu", "--threads", "1"] if self.asked.dry else ["--device", "cuda"]
        command = [*wrapper, self.asked.flint, "bench", folder, *device, *options, "--json"]
        said = self.run(name, command, limit)
        if said is None:
            return None
        report = json.loads(said[said.index("{"):])
        self.results.add("flint", stage=name, command=" ".join(map(str, command[len(wrapper):])), report=report)
        return report

    def checkpoint(self, folder, *options):
        return [PYTHON, HERE / "make_bench_ckpt.py", folder, *options]

    # ---- Flint

    def machine(self):
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,compute_cap", "--format=csv,noheader"]
        found = {}
        if not self.asked.dry and (said := self.run("nvidia-smi", query)):
            names = ("gpu", "driver", "memory", "capability")
            found = dict(zip(names, [part.strip() for part in said.splitlines()[0].split(",")]))
        self.capability = found.get("capability", "9.0").replace(".", "")
        cores = os.cpu_count()
        self.results.add("machine", cores=cores, kernel=os.uname().release, **found)

    def own(self):
        """Flint's figures."""
        dry, results = self.asked.dry, self.results
        preset = "tiny" if dry else "slice"
        self.main = None
        self.slice = self.disk / "slice4"
        began = time.monotonic()
        if self.run("slice4", self.checkpoint(self.slice, "--preset", preset, *FOUR_BITS)) is None:
            return
        results.add("checkpoint", name="slice4", seconds=round(time.monotonic() - began, 1))
        full = None
        if not self.asked.no_full:
            small = ["--layers", "8", "--experts", "16"] if dry else []
            preset = "tiny" if dry else "full"
            command = self.checkpoint(self.work / "full", "--preset", preset, *TWO_BIT_EXPERTS, *small)
            full = self.jobs.start("full", command)
        with self.jobs.quiet():
            self.raw_reads()
        rows = ["--rows", str(self.asked.rows)]
        prompt, deep, decode = ("48", "160", "4") if dry else ("8192", "131072", "64")
        with self.jobs.quiet():
            self.main = self.flint("slice", self.slice, *rows, "--prompt", prompt, "--decode", decode, "--batch",
                                   "1,4,8,16", "--block", "8", "--repeat", "3", "--scan", "64" if dry else "8192")
            drop_cached(self.slice)
            self.flint("deep", self.slice, *rows, "--prompt", f"{prompt},{deep}", "--behind", deep, "--decode",
                       decode, "--batch", "1", "--repeat", "1")
            self.trace()
        self.profile(rows, prompt)
        if full:
            if not self.jobs.wait(full, self.left() - 20):
                results.add("failed", stage="full", why="its checkpoint was not written: full.log")
                return
            decode = "4" if dry else "32"
            with self.jobs.quiet():
                self.flint("full", self.work / "full", "--draw-experts", *rows, "--prompt", prompt, "--decode", decode,
                           "--batch", "1,4,8,16", "--block", "8", "--repeat", "1")
            shutil.rmtree(self.work / "full", ignore_errors=True)

    def raw_reads(self):
        """What one and four sequential readers get from the slice's files: from the disk, then from memory."""
        files = sorted(self.slice.glob("*.safetensors"))
        rates = {}
        if drop_cached(self.slice):
            rates["disk_1"] = read_rate(files, 1, seconds=6)
            drop_cached(self.slice)
            rates["disk_4"] = read_rate(files, 4, seconds=6)
        read_rate(files, 4)
        rates["memory_1"], rates["memory_4"] = read_rate(files, 1), read_rate(files, 4)
        self.results.add("reads", bytes=sum(file.stat().st_size for file in files), bytes_per_second=rates)

    def trace(self):
        """Where a decoding step's time goes while it runs as a graph: kernels, and the gaps between them."""
        if self.asked.dry or not self.main:
            return
        library, trace = self.work / "trace.so", self.out / "trace.txt"
        if why := build_tracer(HERE / "trace.c", library):
            self.results.add("skipped", stage="trace", why=why)
            return
        kernels = next((run["kernels"] for run in self.main["runs"] if run["kind"] == "decode" and run["batch"] == 1), 0)
        self.environment.update(CUDA_INJECTION64_PATH=str(library), FLINT_TRACE=str(trace))
        report = self.flint("trace", self.slice, "--prompt", "16", "--decode", "48", "--batch", "1", "--repeat", "1",
                            limit=60)
        del self.environment["CUDA_INJECTION64_PATH"], self.environment["FLINT_TRACE"]
        found = report and trace.exists() and steps_of(trace, round(kernels))
        if found:
            self.results.add("trace", kind="decode", rows=1, agrees=True, **found)
        else:
            self.results.add("skipped", stage="trace", why="it holds no steps of the kernels that Flint counted")

    def profile(self, rows, prompt):
        """Times of single kernels, of one step of each kind, by Nsight Compute."""
        ncu = shutil.which("ncu")
        if not ncu or self.asked.dry:
            self.results.add("skipped", stage="profile", why="ncu is not installed" if not ncu else "a dry run")
            return
        log = self.out / "ncu.csv"
        metrics = "gpu__time_duration.sum,dram__bytes.sum"
        wrapper = [ncu, "--profile-from-start", "off", "--clock-control", "none", "--cache-control", "none", "--metrics",
                   metrics, "--csv", "--log-file", log]
        report = self.flint("profile", self.slice, *rows, "--prompt", prompt, "--decode", "2", "--batch", "1",
                            "--block", "8", "--repeat", "1", "--profile", wrapper=wrapper, limit=100)
        if report:
            for step in profile_of(log, report["marked"]):
                self.results.add("profile", **step)

    # ---- Peers

    def site(self):
        """A folder of the carried packages, in front of the interpreter's own."""
        wheels = sorted(Path(self.asked.wheels).resolve().glob("*.whl")) if self.asked.wheels else []
        if wheels:
            target = self.work / "site"
            self.run("wheels", [PYTHON, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-cache-dir",
                                "--upgrade", "--target", target, *wheels])
            paths = [str(target), self.environment.get("PYTHONPATH", "")]
            self.environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))

    def start_fla(self):
        """Compiles and tunes its kernels in the background: minutes of one core, and nearly nothing of the device."""
        self.fla_command = [PYTHON, HERE / "bench_kda_fla.py", *(["--rows", "64"] if self.asked.dry else [])]
        self.fla_job = self.jobs.start("fla-compile", self.fla_command, self.environment)

    def fla(self):
        if not self.jobs.wait(self.fla_job, min(150.0, self.left() - 20)):
            self.results.add("failed", stage="fla", why="its kernels were not compiled: fla-compile.log")
            self.fla_job.tell(signal.SIGKILL)
            return
        with self.jobs.quiet():
            said = self.run("fla", self.fla_command, limit=90)
        if said:
            self.results.add("fla", **json.loads(said.strip().splitlines()[-1]))

    def start_llama(self):
        """Builds llama.cpp and its files in the background."""
        folder, source = self.work / "llama", Path(self.asked.llama).resolve()
        folder.mkdir(exist_ok=True)
        if source.is_file():
            source_folder = folder / "source"
            source_folder.mkdir(exist_ok=True)
            subprocess.run(["tar", "xf", source, "-C", source_folder], check=True)
        else:
            source_folder = source
        inner = [path.parent for path in source_folder.glob("*/ggml/CMakeLists.txt")]
        root = source_folder if (source_folder / "ggml").is_dir() else inner[0].parent
        self.llama_bin = Path(self.asked.llama_bin).resolve() if self.asked.llama_bin else folder / "tools/bin"
        script = (HERE / "llama_cuda.sh")
        environment = dict(self.environment, SOURCE=str(root), FOLDER=str(folder), PEERS=str(HERE), PYTHON=PYTHON,
                           BIN=str(self.llama_bin), CAPABILITY=self.capability, CORES=str(os.cpu_count()),
                           PRESET="tiny" if self.asked.dry else "cpu", LAYERS="8", EXPERTS="8" if self.asked.dry else "64",
                           VOCABULARY="1024" if self.asked.dry else "32768",
                           CUDA="" if self.asked.dry else "1")
        if not self.asked.llama_bin:
            self.build = [self.jobs.start("llama-tools", ["bash", script, "tools"], environment),
                          self.jobs.start("llama-cuda", ["bash", script, "cuda"], environment)]
        else:
            self.build = []
            (folder / "quantise.done").touch()
        self.build.append(self.jobs.start("llama-files", ["bash", script, "files"], environment))

    def llama(self):
        began = time.monotonic()
        for job in self.build:
            if not self.jobs.wait(job, self.left() - 20):
                self.results.add("failed", stage="llama", why=f"{job.name} did not end well: {job.name}.log")
                return
        cuda = self.work / "llama/cuda/bin"
        for library in cuda.glob("libggml-cuda.so*") if cuda.is_dir() else []:
            shutil.copy2(library, self.llama_bin, follow_symlinks=False)
        self.results.add("llama-build", waited=round(time.monotonic() - began, 1))
        environment = dict(self.environment)
        environment["LD_LIBRARY_PATH"] = f"{self.llama_bin}:{environment.get('LD_LIBRARY_PATH', '')}"
        model = self.work / "llama/q4.gguf"
        dry = self.asked.dry
        threads = str(min(8, os.cpu_count()))
        common = [self.llama_bin / "llama-bench", "-m", model, "-ngl", "0" if dry else "99", "-t", threads, "-fa", "1",
                  "-b", "2048", "-ub", "2048", "-o", "jsonl"]
        sizes = ["-p", "8,48", "-n", "4", "-r", "1"] if dry else ["-p", "1,8,8192", "-n", "64", "-r", "5"]
        with self.jobs.quiet():
            said = self.run("llama-bench", [*common, *sizes], limit=120, environment=environment)
        for line in (said or "").splitlines():
            if line.startswith("{"):
                row = json.loads(line)
                kind = "prefill" if row["n_gen"] == 0 else "decode"
                self.results.add("llama", kind=kind, tokens=row["n_prompt"] or row["n_gen"], rate=row["avg_ts"],
                                 spread=row["stddev_ts"], backend=row.get("backends"), build=row.get("build_number"))
        batched = self.llama_bin / "llama-batched-bench"
        if not batched.exists():
            return
        sizes = ["-npp", "32", "-ntg", "8" if dry else "64", "-npl", "1,4,8,16", "-c", "4096"]
        command = [batched, "-m", model, "-ngl", "0" if dry else "99", "-fa", "on", "-b", "2048", "-ub", "2048", *sizes,
                   "--output-format", "jsonl"]
        with self.jobs.quiet():
            said = self.run("llama-batched", command, limit=60, environment=environment)
        for line in (said or "").splitlines():
            if line.startswith("{"):
                row = json.loads(line)
                self.results.add("llama", kind="decode of several", tokens=row["pl"], rate=row["speed_tg"])

    def start_transformers(self):
        """Writes its checkpoint in the background."""
        folder = self.work / "bf16"
        needed = 30e9
        if not self.asked.dry and shutil.disk_usage(self.work).free < needed:
            self.results.add("skipped", stage="transformers", why="less than 30 GB are free for its checkpoint")
            return None
        job = self.jobs.start("bf16", self.checkpoint(folder, "--preset", "tiny" if self.asked.dry else "slice"))
        return job, folder

    def transformers(self, job, folder):
        if not self.jobs.wait(job, self.left() - 30):
            self.results.add("failed", stage="transformers", why="its checkpoint was not written: bf16.log")
            return
        sizes = ["--prompt", "32", "--gen", "2", "--reps", "1"] if self.asked.dry else \
            ["--prompt", "2048", "--gen", "32", "--reps", "2", "--device", "cuda", "--experts", "grouped_mm"]
        with self.jobs.quiet():
            said = self.run("transformers", [PYTHON, HERE / "bench_transformers.py", folder, *sizes], limit=150)
        if said:
            self.results.add("transformers", **json.loads(said.strip().splitlines()[-1]))

    # ---- Checks

    def sanitize(self):
        """Every operation's laws under compute-sanitizer, at few rows, several processes at a time."""
        program = Path(self.asked.gpu).resolve()
        command = [program, "--list", "--few", *self.asked.checks]
        names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        tool = shutil.which("compute-sanitizer")
        if not tool and not self.asked.dry:
            self.results.add("skipped", stage="sanitize", why="compute-sanitizer is not installed")
            return
        tasks = [(kind, name) for kind in ("memcheck", "racecheck") for name in names]
        lock = threading.Lock()

        def work():
            while True:
                with lock:
                    if not tasks:
                        return
                    kind, name = tasks.pop(0)
                began = time.monotonic()
                wrapper = [] if self.asked.dry else [tool, "--tool", kind, "--error-exitcode", "9"]
                stage = f"{kind}-{name.replace('/', '-')}"
                said = self.run(stage, [*wrapper, program, "--here", "--few", "--exactly", name], limit=self.asked.patience)
                with lock:
                    self.results.add("sanitize", tool=kind, check=name, clean=said is not None,
                                     seconds=round(time.monotonic() - began, 1))

        workers = [threading.Thread(target=work) for _ in range(1 if self.asked.dry else 6)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()


def parsed():
    ask = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ask.add_argument("--flint", required=True, help="the program")
    ask.add_argument("--work", help="folder for files, best in memory (50 GB with all peers) [default: a temporary one]")
    ask.add_argument("--disk", help="folder on a disk for the slice, so that loads from it are measured [default: --work]")
    ask.add_argument("--out", default="cuda-results", help="folder for results and logs [default: cuda-results]")
    ask.add_argument("--rows", type=int, default=8192, help="rows of one forward of a prompt [default: 8192]")
    ask.add_argument("--no-full", action="store_true", help="leave out the whole shape (110 GB of device memory)")
    ask.add_argument("--no-peers", action="store_true", help="Flint alone")
    ask.add_argument("--no-transformers", action="store_true", help="leave transformers out")
    ask.add_argument("--llama", metavar="SOURCE", help="llama.cpp's sources: a folder or an archive")
    ask.add_argument("--llama-bin", metavar="DIR", help="its programs, built already")
    ask.add_argument("--wheels", metavar="DIR", help="packages to install for the peers, as fla-core")
    ask.add_argument("--gpu", help="the program of the checks (cargo xtask cuda --build)")
    ask.add_argument("--sanitize", action="store_true", help="run the checks under compute-sanitizer, and nothing else")
    ask.add_argument("--checks", nargs="*", default=[], metavar="PART", help="only those with such a part of their names")
    ask.add_argument("--patience", type=float, default=60, help="seconds for each of them [default: 60]")
    ask.add_argument("--budget", type=float, default=3600, help="seconds for everything [default: 3600]")
    ask.add_argument("--dry", action="store_true", help="every stage on the CPU with a tiny model: does the script work?")
    asked = ask.parse_args()
    if asked.sanitize and not asked.gpu:
        ask.error("--sanitize needs --gpu")
    asked.flint = str(Path(asked.flint).resolve())
    return asked


def main():
    asked = parsed()
    bench = Bench(asked)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        bench.machine()
        if asked.sanitize:
            bench.sanitize()
        else:
            peers(bench) if not asked.no_peers else bench.own()
    finally:
        bench.jobs.end()
        bench.results.close()
        if not asked.work:
            shutil.rmtree(bench.work, ignore_errors=True)
    print()
    print(cuda_report.table(bench.results.kept))


def peers(bench):
    """Flint and the peers, in an order that keeps the background busy."""
    asked = bench.asked
    if asked.llama:
        with contextlib.suppress(OSError, subprocess.CalledProcessError, IndexError):
            bench.start_llama()
    bench.site()
    bench.start_fla()
    bench.own()
    waiting = None if asked.no_transformers else bench.start_transformers()
    if asked.llama and hasattr(bench, "build"):
        bench.llama()
    bench.fla()
    if waiting:
        bench.transformers(*waiting)


if __name__ == "__main__":
    main()
