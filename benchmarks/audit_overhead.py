"""What an audit costs over bare forward passes, and whether its memory grows with the data.

The bare passes run `model(input_ids, attention_mask)` as transformers does, logits included, on the same padded
batches, once with the adapter on and once off. The audit measures the same examples: every unit, KL included.
All take turns in one process; the ratio of their median times is the result. For `--memory`, n should fill two windows
(2,048 examples): below that the peak grows because a window does.

`sections` says where one more audit, watched, spent the host's time; `exposed` is what the device did not hide:

    exposed = before the first batch + (between first batch and last result - measure) + after the last result

`--gaps` (on a GPU) runs another audit under torch.profiler: `gaps` says how long the device was busy, how long it was
idle and during which of the host's sections, and lists the ten longest gaps.

    python benchmarks/audit_overhead.py --n 2000 --length 200 --gaps --output overhead.json
    python benchmarks/audit_overhead.py --shape llama-3.1-8b --output overhead_8b.json
    python benchmarks/audit_overhead.py --memory --n 2048 --length 64 --output memory.json
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from device_gaps import profiled, report
from host_sections import Watch, watched
from shapes import SHAPES, random_model

from holdfast.auditing.audit import AuditOptions, audit, audit_roles
from holdfast.auditing.batches import batches, token_budget
from holdfast.auditing.measure import Measurer
from holdfast.auditing.pair import NAMES, Pair, open_pair
from holdfast.auditing.windows import Windows
from holdfast.constraint.chance import ChanceConstraint
from holdfast.core.files import write_json
from holdfast.core.provenance import commit, hardware, versions
from holdfast.core.seeding import generator
from holdfast.data.encode import Encoded, collate
from holdfast.data.stream import open_stream
from holdfast.models.handle import load_model, load_tokenizer
from holdfast.scoring.completion import deterministic

PROMPT_SHARE = 0.5


def random_rows(n: int, length: int, tokenizer: Any, *, spread: float) -> list[dict[str, str]]:
    """Random words of one token each; lengths vary by `spread` about `length`, half of each is the prompt."""
    draw = generator(0, "audit overhead")
    words = sorted(
        w[1:] for w in tokenizer.get_vocab() if w[0] in "\u0120\u2581" and w[1:].isascii() and w[1:].isalpha()
    )
    rows = []
    for _ in range(n):
        size = max(4, round(length * (1 + spread * (2 * draw.random() - 1))))
        chosen = [words[i] for i in draw.integers(0, len(words), size)]
        cut = round(PROMPT_SHARE * size)
        rows.append({"prompt": " ".join(chosen[:cut]), "completion": " ".join(chosen[cut:])})
    return rows


def adapted(model: Any) -> Any:
    """The model with a LoRA adapter on q, k and v, its weights random."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=32, lora_alpha=4, target_modules=["q_proj", "k_proj", "v_proj"], task_type="CAUSAL_LM")
    found = get_peft_model(model, config)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    return found


def write_adapter(model: str, folder: Path, dtype: Any) -> Path:
    """A folder with such an adapter."""
    adapted(load_model(model, dtype=dtype)).save_pretrained(folder)
    return folder


@contextmanager
def opened(options: argparse.Namespace) -> Iterator[Pair]:
    """A model and an adapter on it: from disk, or of a shape, with random weights and in memory alone."""
    if options.shape is not None:
        base = random_model(options.shape)
        with open_pair(base, adapted(base), processing_class=load_tokenizer("embedded")) as pair:
            yield pair
        return
    with tempfile.TemporaryDirectory() as scratch:
        adapter = write_adapter(options.model, Path(scratch) / "adapter", options.dtype)
        with open_pair(options.model, adapter, dtype=options.dtype, device=options.device) as pair:
            yield pair


def timed(function: Callable[[], Any], device: torch.device) -> float:
    """Seconds, with everything the device was given finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def overhead(options: argparse.Namespace) -> dict[str, Any]:
    """Medians of alternating repetitions, and their ratios.

    `measure` is the measurement of examples that are encoded already, `audit` everything after the models are loaded:
    encoding, measurement, noise floor, table and summary.
    """
    with opened(options) as pair:
        rows = random_rows(options.n, options.length, pair.tokenizers.before, spread=options.spread)
        stream = open_stream(rows, template="chat")
        windows = Windows({"audit": stream}, pair, max_length=None)
        rows_encoded = [item for window in windows.prefetcher("before") for item in window.encoded]
        encoded = [rows_encoded[i : i + windows.size] for i in range(0, len(rows_encoded), windows.size)]
        budget = options.batch_tokens or token_budget(pair.model("before"), pair.device)
        measurer = Measurer(pair, first_k=8, kl=True, batch_tokens=budget)
        measurer.check(NAMES, encoded[0][0])
        given = AuditOptions(batch_tokens=budget)
        runs: dict[str, Callable[[], Any]] = {
            "bare": lambda: bare_passes(pair, encoded, budget),
            "measure": lambda: measured(measurer, encoded),
            "audit": lambda: audit_roles(pair, {"audit": stream}, ChanceConstraint(unit="nll_token"), given),
        }
        for run in runs.values():  # warm-up
            run()
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(options.repetitions):
            for name, run in runs.items():
                times[name].append(timed(run, pair.device))
        medians = {name: statistics.median(values) for name, values in times.items()}
        lengths = [len(item.input_ids) for window in encoded for item in window]
        return {
            "ratio": {name: medians[name] / medians["bare"] for name in ("measure", "audit")},
            "median_seconds": medians, "seconds": times, "tokens": sum(lengths),
            "sections": sections(runs["audit"], pair, medians["measure"]),
            **({"gaps": idle_device(runs["audit"], pair)} if options.gaps else {}),
            "scored_tokens": sum(item.n_labels for window in encoded for item in window),
            "batch_tokens": budget, "device": str(pair.device), "weights": pair.dtype,
        }  # fmt: skip


def sections(run: Callable[[], Any], pair: Pair, measure: float) -> dict[str, float]:
    """Where an audit spends the host's time; a forward's includes the wait for a place in the device's queue.

    The checks before the first batch are forwards of one row, and do not count as forwards here.
    """
    whole = Watch()
    with watched(pair, fewest_rows=2) as found:
        whole.around(run)()
    (start, end), first, last = whole.calls[0], found["forward"].calls[0][0], found["waiting"].calls[-1][1]
    return {
        "before_first_batch": first - start, "between": last - first, "after_last_result": end - last,
        "in_forwards": found["forward"].seconds, "encoding": found["encoding"].seconds,
        "collating": found["collating"].seconds, "storing": found["storing"].seconds,
        "waiting_for_results": found["waiting"].seconds, "exposed": (end - start) - measure,
    }  # fmt: skip


def idle_device(run: Callable[[], Any], pair: Pair) -> dict[str, Any]:
    """One more audit under the profiler: when the device had nothing to do, and what the host did then.

    Recording each kernel slows the launches down a little: compare `seconds` with the audit's.
    """
    with watched(pair) as found:
        kernels, whole = profiled(run, pair.device)
    return report(kernels, whole, {name: watch.calls for name, watch in found.items()})


def measured(measurer: Measurer, encoded: list[list[Encoded]]) -> list[Any]:
    """Every window's losses; all are handed to the device before the first is waited for."""
    waiting = [measurer.launch(NAMES, window) for window in encoded]
    return [launched.columns() for launched in waiting]


@torch.no_grad()
def bare_passes(pair: Any, encoded: list[list[Encoded]], budget: int) -> None:
    """The same padded batches through `model(...)`, logits included, adapter off and on."""
    model, pad = pair.model("before"), pair.tokenizers.before.pad_token_id
    with deterministic(model):
        for window in encoded:
            for positions in batches([len(item.input_ids) for item in window], budget):
                rows = collate([window[i] for i in positions], pad)
                inputs = {key: rows[key].to(pair.device) for key in ("input_ids", "attention_mask")}
                for side in ("before", "after"):
                    with pair.on(side):
                        model(**inputs)


def memory(options: argparse.Namespace) -> dict[str, Any]:
    """Peak memory of whole audits at n and 10 n examples, each in a process of its own."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        adapter = write_adapter(options.model, Path(scratch) / "adapter", options.dtype)
        tokenizer = load_tokenizer(options.model)
        for n in (options.n, 10 * options.n):
            data = Path(scratch) / f"{n}.jsonl"
            rows = random_rows(n, options.length, tokenizer, spread=options.spread)
            data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            arguments = ["--audit-once", str(adapter), str(data), "--model", options.model, "--dtype", options.dtype]
            arguments += ["--device", options.device] if options.device else []
            done = subprocess.run(  # noqa: S603  (this file, with our own arguments)
                [sys.executable, __file__, *arguments], capture_output=True, text=True, check=True
            )
            found[str(n)] = json.loads(done.stdout.splitlines()[-1])
    small, large = (found[str(n)]["host_bytes"] for n in (options.n, 10 * options.n))
    return {"peaks": found, "host_growth_bytes_per_example": (large - small) / (9 * options.n)}


def audit_once(options: argparse.Namespace) -> dict[str, Any]:
    """One audit of an adapter on a data file, and this process's peak memory."""
    adapter, data = options.audit_once
    with tempfile.TemporaryDirectory() as scratch:
        found = audit(options.model, adapter, data, dtype=options.dtype, device=options.device, output=f"{scratch}/out")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    device = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    return {"host_bytes": peak, "device_bytes": device, "examples": found.n, "seconds": found.seconds}


def main() -> None:
    """Parse, run, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="a model with random weights instead of --model")
    parser.add_argument("--n", type=int, default=2000)
    parser.add_argument("--length", type=int, default=200)
    parser.add_argument("--spread", type=float, default=0.2, help="lengths vary by this share")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--device", default=None)
    parser.add_argument("--batch-tokens", type=int, default=None)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--gaps", action="store_true", help="also say when the device was idle, and why; needs a GPU")
    parser.add_argument("--memory", action="store_true", help="peak memory at n and 10 n instead of time")
    parser.add_argument("--audit-once", nargs=2, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    if options.shape is not None and (options.memory or options.dtype != "auto" or options.device is not None):
        parser.error("--shape makes its model in memory, where it runs: no --memory, --dtype or --device")
    if options.gaps and (options.memory or not torch.cuda.is_available() or str(options.device).startswith("cpu")):
        parser.error("--gaps looks at the kernels of a timed audit: it needs a GPU, and no --memory")
    if options.audit_once is not None:
        print(json.dumps(audit_once(options)))
        return
    left_out = ("output", "audit_once", *(["model"] if options.shape else []))
    settings = {key: value for key, value in vars(options).items() if key not in left_out and value is not None}
    result = memory(options) if options.memory else overhead(options)
    result |= {"settings": settings, "versions": versions(), "commit": commit(), "hardware": hardware()}
    if options.output is not None:
        write_json(options.output, result)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
