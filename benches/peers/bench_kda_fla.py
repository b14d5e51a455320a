#!/usr/bin/env python3
"""fla-core's chunk kernel of Kimi delta attention on one sequence, as JSON: milliseconds of the recurrence alone, and with
the norms and gates before it. Needs torch with a GPU, triton, einops and fla-core.
usage: bench_kda_fla.py [--rows 8192] [--heads 64] [--dim 128]"""
import argparse
import json

import torch
from fla.ops.kda import chunk_kda


def median_ms(work, warm=3, rounds=15):
    for _ in range(warm):
        work()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[rounds // 2]


def main():
    ask = argparse.ArgumentParser()
    ask.add_argument("--rows", type=int, default=8192)
    ask.add_argument("--heads", type=int, default=64)
    ask.add_argument("--dim", type=int, default=128)
    asked = ask.parse_args()
    rows, heads, dim = asked.rows, asked.heads, asked.dim
    torch.manual_seed(1)

    def drawn(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    wide = (1, rows, heads, dim)
    q, k, v, raw, beta = drawn(*wide), drawn(*wide), drawn(*wide), drawn(*wide), drawn(1, rows, heads)
    state = torch.zeros(1, heads, dim, dim, device="cuda")
    a_log, dt_bias = torch.zeros(heads, device="cuda"), torch.zeros(heads * dim, device="cuda")
    given = dict(v=v, initial_state=state, output_final_state=True)
    unit = dict(q=torch.nn.functional.normalize(q, dim=-1), k=torch.nn.functional.normalize(k, dim=-1))
    # Decay between exp(-5) and 1, as the model bounds it; fla-core has a faster path for bounded gates.
    ready = dict(unit, g=-5 * torch.sigmoid(raw.float()), beta=torch.sigmoid(beta))
    whole = dict(q=q, k=k, g=raw, beta=beta, A_log=a_log, dt_bias=dt_bias, use_qk_l2norm_in_kernel=True,
                 use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, lower_bound=-5.0)
    variants = {
        "scan": dict(given, **ready),
        "scan, bounded gates": dict(given, **ready, safe_gate=True),
        "with norms and gates": dict(given, **whole, safe_gate=True),
    }
    found = {}
    with torch.inference_mode():
        for name, arguments in variants.items():
            try:
                found[name] = round(median_ms(lambda: chunk_kda(**arguments)), 4)
            except Exception as error:  # a version without this option
                found[name] = None
                print(f"{name}: {type(error).__name__}: {str(error)[:300]}")
    print(json.dumps(dict(engine="fla-core chunk_kda", torch=torch.__version__, rows=rows, heads=heads, dim=dim, ms=found)))


if __name__ == "__main__":
    main()
