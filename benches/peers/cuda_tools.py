"""What cuda.py needs beside its stages: records, background processes, raw reads, and a profiler's table."""
import contextlib
import csv
import ctypes
import glob
import importlib.util
import json
import os
import re
import signal
import statistics
import subprocess
import threading
import time
from pathlib import Path

PIECE = 16 << 20


class Results:
    """Records, one a line of a file as they come."""

    def __init__(self, path):
        self.file, self.kept, self.began = open(path, "w"), [], time.monotonic()

    def add(self, what, **fields):
        record = dict(what=what, at=round(time.monotonic() - self.began, 1), **fields)
        self.kept.append(record)
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()
        short = {name: value for name, value in fields.items() if name not in ("report", "kernels", "command")}
        print(f"[{record['at']:6.1f} s] {what} {json.dumps(short)[:400]}", flush=True)

    def close(self):
        self.file.close()


class Job:
    """A background command and everything that it starts: one session of processes."""

    def __init__(self, name, command, log, environment):
        self.name = name
        with open(log, "w") as out:
            self.process = subprocess.Popen([str(part) for part in command], stdout=out, stderr=subprocess.STDOUT,
                                            stdin=subprocess.DEVNULL, start_new_session=True, env=environment)

    def alive(self):
        return self.process.poll() is None

    def members(self):
        """Processes of the session with their states."""
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with contextlib.suppress(OSError, IndexError, ValueError):
                    fields = Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()
                    if int(fields[3]) == self.process.pid:
                        found.append((int(entry), fields[0]))
        return found

    def tell(self, number):
        for pid, _ in self.members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def freeze(self):
        # A process that was just started may have been missed.
        for _ in range(10):
            self.tell(signal.SIGSTOP)
            time.sleep(0.02)
            if all(state in "TtZX" for _, state in self.members()):
                return


class Jobs:
    """Background jobs, which stand still while something is timed."""

    def __init__(self, logs):
        self.logs, self.all = logs, []

    def start(self, name, command, environment=None):
        job = Job(name, command, self.logs / f"{name}.log", environment)
        self.all.append(job)
        return job

    @contextlib.contextmanager
    def quiet(self):
        frozen = [job for job in self.all if job.alive()]
        for job in frozen:
            job.freeze()
        try:
            yield
        finally:
            for job in frozen:
                job.tell(signal.SIGCONT)

    def wait(self, job, seconds):
        """Whether the job ends well within so many seconds."""
        try:
            return job.process.wait(max(seconds, 0.1)) == 0
        except subprocess.TimeoutExpired:
            return False

    def end(self):
        for job in self.all:
            if job.alive():
                job.tell(signal.SIGKILL)
                job.process.wait()


def drop_cached(folder):
    """Drops the files' cached pages; whether they lie on a disk, from which they are read again."""
    files = [path for path in Path(folder).iterdir() if path.is_file()]
    for path in files:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return cached_share(max(files, key=lambda path: path.stat().st_size)) < 0.1


def cached_share(path):
    """The share of a file's pages that is in memory."""
    size, page = os.path.getsize(path), os.sysconf("SC_PAGE_SIZE")
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    library.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    with open(path, "rb") as file:
        start = library.mmap(None, size, 1, 1, file.fileno(), 0)
    pages = (ctypes.c_ubyte * (-(-size // page)))()
    known = library.mincore(start, size, pages)
    library.munmap(start, size)
    return sum(byte & 1 for byte in bytes(pages)) / len(pages) if known == 0 else 1.0


def read_rate(files, readers, seconds=None):
    """Bytes a second of so many sequential readers, each of its own part of the files; all of it, or for some seconds."""
    size = sum(file.stat().st_size for file in files)
    per_reader = -(-size // readers)
    done, began = [0] * readers, time.monotonic()

    def read(reader):
        buffer = bytearray(PIECE)
        at, end, base = reader * per_reader, min(size, (reader + 1) * per_reader), 0
        for file in files:
            length = file.stat().st_size
            first, last = max(at, base), min(end, base + length)
            if first < last:
                handle = os.open(file, os.O_RDONLY)
                position = first - base
                while position < last - base and (seconds is None or time.monotonic() - began < seconds):
                    want = memoryview(buffer)[:min(PIECE, last - base - position)]
                    got = os.preadv(handle, [want], position)
                    position += got
                    done[reader] += got
                os.close(handle)
            base += length

    threads = [threading.Thread(target=read, args=(reader,)) for reader in range(readers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(done) / (time.monotonic() - began)


def profile_of(log, marked):
    """A profiler's csv as a record for each marked step: its kernels by name and grid, the longest first."""
    scale = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3, "s": 1e6, "second": 1e6,
             "byte": 1e-6, "Kbyte": 1e-3, "Mbyte": 1.0, "Gbyte": 1e3}
    with open(log) as file:
        rows = list(csv.reader(line for line in file if line.startswith('"')))
    if not rows:
        return
    place = {name: index for index, name in enumerate(rows[0])}
    launches = {}
    for row in rows[1:]:
        cell = lambda name: row[place[name]]
        launch = launches.setdefault(cell("ID"), dict(name=cell("Kernel Name").split("(")[0],
                                                      grid=cell("Grid Size").replace(" ", "").strip("()")))
        kind = "us" if "time" in cell("Metric Name") else "mb"
        launch[kind] = float(cell("Metric Value").replace(",", "")) * scale.get(cell("Metric Unit"), 1.0)
    launches = list(launches.values())
    counted = sum(step["kernels"] for step in marked)
    first = 0
    for step in marked:
        own = launches[first:first + step["kernels"]]
        first += step["kernels"]
        classes = {}
        for launch in own:
            entry = classes.setdefault((launch["name"], launch["grid"]), [0, 0.0, 0.0])
            entry[0] += 1
            entry[1] += launch.get("us", 0.0)
            entry[2] += launch.get("mb", 0.0)
        ordered = sorted(classes.items(), key=lambda item: -item[1][1])
        kernels = [dict(name=name, grid=grid, count=count, us=round(us, 2), mb=round(mb, 3))
                   for (name, grid), (count, us, mb) in ordered]
        yield dict(kind=step["kind"], rows=step["rows"], launches=len(own), agrees=counted == len(launches),
                   us=round(sum(launch.get("us", 0.0) for launch in own), 1),
                   mb=round(sum(launch.get("mb", 0.0) for launch in own), 1), kernels=kernels)


def build_tracer(source, library):
    """Builds trace.c with the CUPTI of the toolkit or of its Python package; an error's text where that fails."""
    roots = sorted(glob.glob("/usr/local/cuda*"))
    package = importlib.util.find_spec("nvidia")
    for folder in package.submodule_search_locations if package else []:
        roots += sorted(glob.glob(f"{folder}/*"))
    includes = [f"-I{folder}" for root in roots for folder in (f"{root}/extras/CUPTI/include", f"{root}/include")
                if os.path.isdir(folder)]
    said = "no cupti.h below " + ", ".join(roots)
    for root in roots:
        heads = glob.glob(f"{root}/extras/CUPTI/include/cupti_activity.h") + glob.glob(f"{root}/include/cupti_activity.h")
        binaries = [path for folder in ("extras/CUPTI/lib64", "lib64", "lib", "targets/x86_64-linux/lib")
                    for path in sorted(glob.glob(f"{root}/{folder}/libcupti.so*"))]
        if not heads or not binaries:
            continue
        # The newest record is the one that the library of the same release writes.
        names = re.findall(r"} (CUpti_ActivityKernel\d+);", Path(heads[0]).read_text())
        binary = binaries[-1]
        command = ["cc", "-shared", "-fPIC", "-O2", f"-DKERNEL={names[-1]}", f"-I{os.path.dirname(heads[0])}", *includes,
                   str(source), "-o", str(library), binary, f"-Wl,-rpath,{os.path.dirname(binary)}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return None
        said = done.stderr[-500:]
    return said


def steps_of(trace, kernels):
    """The steps of a trace that ran as graphs of so many kernels: what the median one holds."""
    with open(trace) as file:
        rows = [line.rstrip("\n").split(" ", 4) for line in file]
    launches = sorted((int(start), int(end), grid, name.split("(")[0]) for start, end, graph, grid, name in rows if graph != "0")
    steps = [launches[first:first + kernels] for first in range(0, len(launches) - kernels, kernels)]
    # The first steps warm up; those after the decoding are other graphs.
    same = [step for step in steps[2:] if [launch[2:] for launch in step] == [launch[2:] for launch in steps[1]]]
    if len(same) < 4:
        return None
    busy, spans, classes = [], [], {}
    for step in same:
        end, filled = step[0][0], 0
        for first, last, _, _ in step:
            filled += max(0, last - max(first, end))
            end = max(end, last)
        busy.append(filled / 1e3)
        spans.append((end - step[0][0]) / 1e3)
        for first, last, grid, name in step:
            entry = classes.setdefault((name, grid), [0, 0.0])
            entry[0] += 1
            entry[1] += (last - first) / 1e3
    ordered = sorted(classes.items(), key=lambda item: -item[1][1])
    return dict(steps=len(same), launches=kernels, us=round(statistics.median(busy), 1), span_us=round(statistics.median(spans), 1),
                kernels=[dict(name=name, grid=grid, count=count // len(same), us=round(us / len(same), 2), mb=0.0)
                         for (name, grid), (count, us) in ordered])
