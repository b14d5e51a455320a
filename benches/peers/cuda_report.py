#!/usr/bin/env python3
"""The records of cuda.py as a table: each figure with its floor, its share of it, and the goal.
usage: cuda_report.py results.jsonl [--markdown]"""
import json
import sys

# A kernel's part of a step below which it is not named.
LEAST_PART = 0.01


class Records:
    def __init__(self, records):
        self.records = records

    def all(self, what, **fields):
        return [record for record in self.records if record["what"] == what
                and all(record.get(name) == value for name, value in fields.items())]

    def last(self, what, **fields):
        found = self.all(what, **fields)
        return found[-1] if found else None

    def report(self, stage):
        record = self.last("flint", stage=stage)
        return record and Report(record["report"])


class Report:
    """One `flint bench`."""

    def __init__(self, report):
        self.report = report
        limits = report["limits"][0]
        self.bandwidth = limits["bytes_per_second"]
        self.upload = limits.get("upload_bytes_per_second")
        self.product = limits["operations_per_second"].get("bf16 product")
        self.layers = report["model"]["layers"]

    def runs(self, kind):
        return [Run(run, self) for run in self.report["runs"] if run["kind"] == kind]

    def run(self, kind, size):
        return next((run for run in self.runs(kind) if run.size == size), None)


class Run:
    """One measurement of it."""

    def __init__(self, run, report):
        self.run, self.report = run, report
        self.kind, self.size, self.rate = run["kind"], run["size"], run["tokens_per_second"]
        self.batch, self.kernels, self.experts = run["batch"], run.get("kernels"), run.get("distinct_experts")
        self.steps = run["tokens"] / run["batch"] if not self.kind.startswith("prefill") else 1
        self.step = run["seconds"] / self.steps
        self.bytes = run["bytes_per_token"] * run["tokens"] / self.steps
        self.operations = run["operations_per_token"] * run["tokens"] / self.steps
        self.of_bytes, self.of_product = run["share_of_bytes"], run["share_of_peak"]


def percent(share):
    return "-" if share is None else f"{share * 100:.1f} %"


def against(value, goal, least=True):
    """The goal, and whether it is reached."""
    if value is None:
        return f"{'>=' if least else '<='} {goal}"
    good = value >= goal if least else value <= goal
    return f"{'>=' if least else '<='} {goal}: {'yes' if good else 'no'}"


def decode_rows(report, name, goals):
    rows = []
    for run in report.runs("decode"):
        figure = "D1" if run.batch == 1 else "D2"
        floor = f"{run.bytes / 1e9:.3f} GB, {run.bytes / report.bandwidth * 1e3:.3f} ms"
        goal = against(run.of_bytes, 0.60 if run.batch == 1 else 0.55) if goals else ""
        experts = f", {run.experts:.1f} experts a layer" if run.experts and run.batch > 1 else ""
        rows.append((figure, f"{name}decode of {run.batch}{experts}", f"{run.rate:.1f} tok/s, {run.step * 1e3:.3f} ms",
                     floor, percent(run.of_bytes), goal))
    one = report.run("decode", 1)
    for run in report.runs("block"):
        rows.append(("", f"{name}block of {run.size} rows of one sequence, {run.experts or 0:.1f} experts a layer",
                     f"{run.rate:.1f} rows/s, {run.step * 1e3:.3f} ms",
                     f"{run.bytes / 1e9:.3f} GB, {run.bytes / report.bandwidth * 1e3:.3f} ms", percent(run.of_bytes), ""))
        if one:
            cost, floor = run.step / one.step, run.bytes / one.bytes
            rows.append(("V1", f"{name}{run.size} rows over one row", f"{cost:.2f} times", f"{floor:.2f} times by bytes",
                         f"{cost / floor:.2f}", against(cost / floor, 1.15, least=False) if goals else ""))
    return rows


def prefill_rows(report, name, goal):
    rows = []
    for run in report.runs("prefill"):
        floor = "-"
        if report.product:
            floor = f"{run.operations / 1e12:.1f} TFLOP, {run.operations / report.product * 1e3:.1f} ms"
        rows.append(("P1", f"{name}prefill of {run.size}", f"{run.rate:.0f} tok/s", floor, percent(run.of_product),
                     against(run.of_product, goal) if goal else ""))
    return rows


def kernel_rows(report, records):
    rows, one = [], report.run("decode", 1)
    for run in report.runs("decode") + report.runs("block"):
        if run.kernels and (run.batch == 1 or run.kind == "block"):
            goal = against(run.kernels / report.layers, 12, least=False) if run.batch == 1 else ""
            rows.append(("D3", f"kernels of a {run.kind} of {run.batch}, embedding and head with them",
                         f"{run.kernels:.0f}, {run.kernels / report.layers:.1f} a layer", "", "", goal))
    traced = records.last("trace")
    step = traced or records.last("profile", kind="decode", rows=1)
    if step and one:
        gaps = max(0.0, 1 - step["us"] / (one.step * 1e6))
        how = "in which a kernel runs" if traced else "of kernels, each alone"
        rows.append(("D3", "gaps between kernels over a step, the host's part with them", f"{one.step * 1e6:.0f} us a step",
                     f"{step['us']:.0f} us {how}", percent(gaps), against(gaps, 0.15, least=False)))
    return rows


def deep_rows(report, short):
    rows = []
    prefills, ends = report.runs("prefill"), report.runs("prefill end")
    if len(prefills) > 1 and ends:
        first, long, end = prefills[0], prefills[-1], ends[-1]
        rows.append(("P3", f"prefill: the last {end.run['tokens']} of {long.size} over {first.size} alone",
                     f"{end.rate:.0f} tok/s", f"{first.rate:.0f} tok/s", percent(end.rate / first.rate),
                     against(end.rate / first.rate, 0.85)))
        rows.append(("P3", f"prefill: all {long.size} over {first.size} alone", f"{long.rate:.0f} tok/s",
                     f"{first.rate:.0f} tok/s", percent(long.rate / first.rate), ""))
    one, near = report.run("decode", 1), short and short.run("decode", 1)
    if one:
        over = f", {near.rate / one.rate:.2f} times a short one's" if near else ""
        rows.append(("P3", f"decode behind {report.report['prompt_before_decode']}{over}",
                     f"{one.rate:.1f} tok/s, {one.step * 1e3:.3f} ms",
                     f"{one.bytes / 1e9:.3f} GB, {one.bytes / report.bandwidth * 1e3:.3f} ms", percent(one.of_bytes), ""))
    return rows


def scan_rows(report, fla):
    rows, times = [], (fla or {}).get("ms", {})
    for scan in report.report["scans"]:
        whole = times.get("with norms and gates")
        bare = min((times[name] for name in ("scan", "scan, bounded gates") if times.get(name)), default=None)
        what = f"scan of {scan['rows']} rows, {scan['heads']} heads of {scan['head_dim']}"
        floor = scan["bytes"] / report.bandwidth * 1e3
        for name, own, other in ((what, scan["seconds"], bare), (f"{what}, norms and gates", scan["prepared_seconds"], whole)):
            ratio = other and other / (own * 1e3)
            rows.append(("K1", name, f"{own * 1e3:.3f} ms", f"{floor:.3f} ms by bytes; fla-core {other or '-'} ms",
                         "-" if ratio is None else f"{ratio:.2f}", against(ratio, 1.0)))
    return rows


def load_rows(records):
    rows, reads = [], records.last("reads")
    rates = reads["bytes_per_second"] if reads else {}
    for stage, place in (("slice", "memory"), ("deep", "disk")):
        report = records.report(stage)
        if not report or f"{place}_1" not in rates:
            continue
        size, seconds = report.report["model"]["weight_bytes"], report.report["load_seconds"][0]
        for readers, words in ((1, "one sequential reader"), (4, "four")):
            raw = rates[f"{place}_{readers}"]
            roof = min(raw, report.upload or raw)
            rows.append(("T2", f"load from {place}, over {words}", f"{seconds:.2f} s, {size / seconds / 1e9:.2f} GB/s",
                         f"{size / roof:.2f} s, {raw / 1e9:.2f} GB/s",
                         percent(size / seconds / roof), against(size / seconds / roof, 0.8)))
    report = records.report("slice")
    if report and report.upload:
        rows.append(("T2", "pinned host memory to the device", f"{report.upload / 1e9:.1f} GB/s", "", "", ""))
    return rows


def peer_rows(report, records):
    rows = []
    for peer in records.all("llama"):
        name, own, goal = None, None, ""
        if peer["kind"] == "decode":
            own, name, goal = report.run("decode", 1), "decode of 1", 3
        elif peer["kind"] == "decode of several":
            own, name = report.run("decode", peer["tokens"]), f"decode of {peer['tokens']}"
        elif peer["tokens"] == 8:
            own, name = report.run("block", 8), "block of 8 rows"
        elif peer["tokens"] > 64:
            own, name, goal = report.run("prefill", peer["tokens"]), f"prefill of {peer['tokens']}", 4
        if own and peer["rate"]:
            ratio = own.rate / peer["rate"]
            rows.append(("", f"{name} over llama.cpp's, Q4_0 of the same sizes", f"{own.rate:.1f} tok/s",
                         f"{peer['rate']:.1f} tok/s", f"{ratio:.2f}", against(ratio, goal) if goal else ""))
    other = records.last("transformers")
    if other:
        rows.append(("", f"{other['engine']} in bf16, prefill of {other['prompt']}", f"{other['prefill_tok_s']:.0f} tok/s", "", "", ""))
        rows.append(("", f"{other['engine']} in bf16, decode of 1", f"{other['decode_tok_s']:.1f} tok/s", "", "", ""))
    return rows


def profile_lines(step):
    head = f"\nOne {step['kind']} of {step['rows']}: {step['launches']} kernels, {step['us']:.0f} us"
    if "span_us" in step:
        head += f" of {step['span_us']:.0f} us from its first to its last, in its graph (kernels may overlap)"
    else:
        head += f", {step['mb']:.0f} MB moved, each kernel alone"
    lines = [head + ("" if step["agrees"] else " (the profiler saw another number of kernels)")]
    for kernel in step["kernels"]:
        if kernel["us"] < LEAST_PART * step["us"]:
            continue
        each = kernel["us"] / kernel["count"]
        rate = f" {kernel['mb'] / kernel['us']:6.2f} TB/s" if kernel["mb"] else ""
        lines.append(f"  {kernel['name']:<28} {kernel['grid']:<16} {kernel['count']:4d} × {each:9.2f} us "
                     f"{kernel['us'] / step['us'] * 100:5.1f} %{rate}")
    return lines


def lined_up(rows):
    """Rows as text for a terminal."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def in_markdown(rows):
    """Rows as a table of a document."""
    head, *rest = ["| " + " | ".join(row) + " |" for row in rows]
    return ["", head, "|---" * len(rows[0]) + "|", *rest]


def table(records, draw=lined_up):
    """Everything as text."""
    records = Records(records)
    machine, lines = records.last("machine") or {}, []
    lines.append(" · ".join(str(machine[name]) for name in ("gpu", "driver", "memory", "kernel") if name in machine)
                 + f" · {machine.get('cores')} cores")
    short, full, deep = records.report("slice"), records.report("full"), records.report("deep")
    rows = []
    if short:
        product = f", bf16 product {short.product / 1e12:.0f} TFLOP/s" if short.product else ""
        lines.append(f"copy {short.bandwidth / 1e12:.3f} TB/s{product}; arithmetic {short.report['arithmetic']}; prefill in parts "
                     f"of {short.report['prefill_rows']} rows; decode behind {short.report['prompt_before_decode']} tokens")
        rows += decode_rows(short, "", True) + kernel_rows(short, records) + prefill_rows(short, "", 0.35)
    if deep:
        rows += deep_rows(deep, short)
    if short:
        rows += scan_rows(short, records.last("fla"))
    rows += load_rows(records)
    if full:
        rows += decode_rows(full, "whole shape, ", False) + prefill_rows(full, "whole shape, ", 0.35)
        seconds = full.report["load_seconds"][0]
        rows.append(("", "whole shape, load with experts drawn", f"{seconds:.1f} s", "", "", ""))
    if short:
        rows += peer_rows(short, records)
    head = ("", "figure", "value", "floor or peer", "share", "goal")
    lines += draw([head, *rows])
    for step in records.all("trace") + records.all("profile"):
        lines += profile_lines(step)
    checks = records.all("sanitize")
    if checks:
        bad = [f"{check['tool']} {check['check']}" for check in checks if not check["clean"]]
        lines.append(f"\ncompute-sanitizer: {len(checks) - len(bad)} of {len(checks)} runs are clean"
                     + "".join(f"\n  not clean or not finished: {name}" for name in bad))
    for record in records.all("failed") + records.all("skipped"):
        lines.append(f"{record['what']}: {record['stage']}: {record['why'][:300]}")
    return "\n".join(lines)


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        kept = [json.loads(line) for line in file]
    print(table(kept, in_markdown if "--markdown" in sys.argv else lined_up))
