#!/usr/bin/env python3
"""Attention as others compute it: writes torch.txt and onnxruntime.txt beside this file.

    python3 -m venv venv && venv/bin/pip install -r tests/golden/requirements.txt
    venv/bin/python tests/golden/make.py

Nothing here calls or was derived from the crate, whose own oracle might share its authors'
misunderstandings. torch.txt is PyTorch's `scaled_dot_product_attention` in double precision, with
masks for what hides keys or adds to scores, and a key of zeros for a sink. Where a soft cap stands
between the product and the softmax that function cannot say it; there it is the formula written out,
which the script also holds against PyTorch's function wherever both can be had. onnxruntime.txt is
the operator GroupQueryAttention, in f32, which is what engines run.

The format, line by line:

    # remarks, with the versions that were used
    case NAME                 what follows is about it, to the next one
    by WHAT                   which function gave the result
    sizes KV_HEADS GROUP K_WIDTH V_WIDTH N_Q LEN
    seed N                    of the inputs
    numbers KIND              what keys and values are drawn from, see `Numbers`
    option NAME VALUE..       as in `AttentionOptions`; `tree` lists parents, -1 for none
    inputs HEX                FNV-1a of the bits of all inputs: queries, keys, values
    row LSE NUMBER..          for each query row and head: log-sum-exp (- if there is none), output

Inputs are not in the files. Both sides draw them from a seed, by integers and exact conversions.
"""
import math
import os
import sys

import numpy as np
import onnx
import onnxruntime
import torch

HERE = os.path.dirname(os.path.abspath(__file__))
MASK = (1 << 64) - 1


class Numbers:
    """splitmix64 (Steele, Lea and Flood 2014), as in `src/internal/numbers.rs`."""

    def __init__(self, seed):
        self.state = seed

    def bits(self):
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        z = self.state
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
        return z ^ (z >> 31)

    def below(self, end):
        return (self.bits() >> 32) * end >> 32

    def normal(self):
        """Twelve whole numbers of 16 bits, added, less their mean, in 65,536ths."""
        words = [self.bits() for _ in range(3)]
        return (sum(word >> shift & 0xFFFF for word in words for shift in (0, 16, 32, 48)) - 6 * 65535) / 65536

    def whole(self, width, most, share, unit):
        """A row of whole numbers up to `most`, the first of each `share` as large as can be, so that
        a type with one scale for `share` numbers stores all of them exactly."""
        row = []
        for column in range(width):
            number = self.below(2 * most + 1) - most
            if column % share == 0:
                number = most if number >= 0 else -most
            row.append(number / unit)
        return row

    def rows(self, kind, count, width):
        """Of a kind: `normal` (variance one); `bytes`, which f16, bf16 and Int8 hold exactly;
        `nibbles`, which f16, bf16 and Int4 do."""
        draw = {
            "normal": lambda: [self.normal() for _ in range(width)],
            "bytes": lambda: self.whole(width, 127, width, 64),
            "nibbles": lambda: self.whole(width, 7, 32, 4),
        }[kind]
        return np.array([draw() for _ in range(count)], np.float32)


class Case:
    def __init__(self, name, sizes, seed, numbers="normal", **options):
        self.name, self.seed, self.numbers, self.options = name, seed, numbers, options
        self.kv_heads, self.group, self.k_width, self.v_width, self.n_q, self.len = sizes
        self.heads = self.kv_heads * self.group
        draw = Numbers(seed)
        q = draw.rows("normal", self.n_q * self.heads, self.k_width)
        k = draw.rows(numbers, self.len * self.kv_heads, self.k_width)
        v = draw.rows(numbers, self.len * self.kv_heads, self.v_width)
        self.q = q.reshape(self.n_q, self.heads, self.k_width)
        self.k = k.reshape(self.len, self.kv_heads, self.k_width)
        self.v = v.reshape(self.len, self.kv_heads, self.v_width)

    def checksum(self):
        bits = 0xCBF29CE484222325
        for array in (self.q, self.k, self.v):
            for byte in array.astype("<f4").tobytes():
                bits = (bits ^ byte) * 0x100000001B3 & MASK
        return bits

    def scale(self):
        return self.options.get("scale", 1 / math.sqrt(self.k_width))

    def positions(self):
        """Of the query rows, which are the last ones."""
        return torch.arange(self.len - self.n_q, self.len)[:, None]

    def seen(self):
        """[n_q, len]: which keys a query row sees."""
        at, key, option = self.positions(), torch.arange(self.len)[None, :], self.options.get
        seen = torch.ones(self.n_q, self.len, dtype=torch.bool)
        if option("causal", 1):
            seen &= key <= at
        if option("window"):
            # The last `window` keys, the query's own among them; before them the first ones.
            seen &= (at - key < option("window")) | (key < option("keep_first", 0))
        if option("positions"):
            first, end = option("positions")
            seen &= (first <= key) & (key < end)
        parents = option("tree", [])
        for row in range(len(parents)):
            family, ancestor = set(), row
            while ancestor >= 0:
                family.add(ancestor)
                ancestor = parents[ancestor]
            for other in set(range(len(parents))) - family:
                seen[self.n_q - len(parents) + row, self.len - len(parents) + other] = False
        return seen

    def bias(self):
        """[heads, n_q, len]: what is added to scores."""
        slopes = torch.tensor(self.options["alibi_slopes"], dtype=torch.float64)
        distance = (self.positions() - torch.arange(self.len)[None, :]).abs()
        return -slopes[:, None, None] * distance

    def head_lines(self, by):
        yield f"case {self.name}"
        yield f"by {by}"
        yield f"sizes {self.kv_heads} {self.group} {self.k_width} {self.v_width} {self.n_q} {self.len}"
        yield f"seed {self.seed}"
        yield f"numbers {self.numbers}"
        for name, value in self.options.items():
            values = value if isinstance(value, (list, tuple)) else [value]
            yield f"option {name} {' '.join(str(value) for value in values)}"
        yield f"inputs {self.checksum():016x}"


def row_lines(out, lse):
    """Eight decimals: half of the last one is a four-hundredth of the narrowest bound."""
    for row, head in np.ndindex(out.shape[:2]):
        numbers = " ".join(f"{number:.8f}" for number in out[row, head])
        yield f"row {'-' if lse is None else format(lse[row, head], '.8f')} {numbers}"


# PyTorch


def doubles(array):
    """[rows, heads, width] to [1, heads, rows, width], as PyTorch has it."""
    return torch.tensor(array, dtype=torch.float64).transpose(0, 1)[None]


def by_formula(case):
    """Softmax of scores, written out: output [n_q, heads, v_width], log-sum-exp [n_q, heads]."""
    q, k, v = (doubles(array)[0] for array in (case.q, case.k, case.v))
    k, v = (array.repeat_interleave(case.group, dim=0) for array in (k, v))
    scores = case.scale() * q @ k.transpose(1, 2)
    if "soft_cap" in case.options:
        cap = case.options["soft_cap"]
        scores = cap * torch.tanh(scores / cap)
    if "alibi_slopes" in case.options:
        scores = scores + case.bias()
    scores = scores.masked_fill(~case.seen(), -math.inf)
    lse = torch.logsumexp(scores, dim=2)
    denominator = lse
    if "sinks" in case.options:
        sinks = torch.tensor(case.options["sinks"], dtype=torch.float64)[:, None]
        denominator = torch.logaddexp(lse, sinks)
    out = torch.exp(scores - denominator[:, :, None]) @ v
    return out.transpose(0, 1).numpy(), lse.T.numpy()


def by_sdpa(case):
    """PyTorch's own function, told no more than it needs to hear."""
    q, k, v = (doubles(array) for array in (case.q, case.k, case.v))
    how, mask = {"enable_gqa": case.group > 1}, None
    if "scale" in case.options:
        how["scale"] = case.options["scale"]
    seen = case.seen()
    if "alibi_slopes" in case.options or "sinks" in case.options:
        mask = torch.zeros(case.heads, case.n_q, case.len, dtype=torch.float64)
        if "alibi_slopes" in case.options:
            mask += case.bias()
        mask = mask.masked_fill(~seen, -math.inf)
        if "sinks" in case.options:
            # A key of zeros scores zero, and then its bias; its value is nothing.
            sinks = torch.tensor(case.options["sinks"], dtype=torch.float64)
            mask = torch.cat([mask, sinks[:, None, None].expand(-1, case.n_q, 1)], dim=2)
            k, v = (torch.nn.functional.pad(array, (0, 0, 0, 1)) for array in (k, v))
        how["attn_mask"] = mask[None]
    elif case.n_q == case.len and not case.options:
        how["is_causal"] = True
    elif not seen.all():
        how["attn_mask"] = seen
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, **how)
    return out[0].transpose(0, 1).numpy()


def torch_cases():
    heads = dict(sizes=(2, 3, 24, 20, 3, 90))
    slopes = [1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128]
    sinks = [0.5, -1.25, 2.0, 3.5, -0.375, 1.0]
    # Groups, widths, one row and many, past the places where tiles end.
    yield Case("one-query-head-for-each", (2, 1, 64, 64, 1, 100), 1)
    yield Case("group-of-4", (2, 4, 64, 64, 1, 150), 2)
    yield Case("group-of-8-width-128", (1, 8, 128, 128, 1, 70), 3)
    yield Case("group-of-3-three-heads", (3, 3, 64, 64, 1, 129), 4, "bytes")
    yield Case("group-of-16", (1, 16, 32, 32, 1, 65), 5, "nibbles")
    yield Case("whole-prompt", (1, 3, 16, 16, 20, 20), 6)
    yield Case("whole-prompt-bytes", (2, 2, 16, 8, 20, 20), 7, "bytes")
    yield Case("rows-behind-others", (2, 2, 48, 32, 5, 133), 8)
    yield Case("rows-behind-others-bytes", (2, 2, 32, 32, 5, 133), 9, "bytes")
    yield Case("rows-behind-others-nibbles", (2, 2, 32, 32, 5, 133), 10, "nibbles")
    yield Case("many-rows", (1, 2, 16, 16, 33, 81), 11, "bytes")
    yield Case("long", (1, 2, 16, 16, 2, 1100), 12)
    yield Case("long-bytes", (1, 2, 32, 32, 2, 1030), 13, "bytes")
    yield Case("odd-widths", (1, 5, 17, 33, 2, 77), 14)
    # Each option alone, over each kind of numbers, then together.
    seed = 20
    for numbers in ("normal", "bytes", "nibbles"):
        for name, options in [
            ("scale", dict(scale=0.375)),
            ("not-causal", dict(causal=0)),
            ("window", dict(window=17)),
            ("window-and-first", dict(window=17, keep_first=4)),
            ("soft-cap", dict(soft_cap=1.5)),
            ("sinks", dict(sinks=sinks)),
            ("alibi", dict(alibi_slopes=slopes)),
        ]:
            seed += 1
            yield Case(f"{name}-{numbers}", **heads, seed=seed, numbers=numbers, **options)
    yield Case("part", **heads, seed=50, positions=[20, 61])
    yield Case("tree", (2, 3, 24, 20, 7, 90), 51, tree=[-1, 0, 0, 1, 2, 3])
    yield Case("cap-window-scale", **heads, seed=52, soft_cap=4.0, window=40, scale=0.5)
    yield Case("sinks-window", **heads, seed=53, numbers="bytes", sinks=sinks, window=32)
    yield Case("alibi-first-sinks", **heads, seed=54, alibi_slopes=slopes, window=33, keep_first=2, sinks=sinks)
    yield Case("cap-alibi-sinks", **heads, seed=55, soft_cap=2.0, alibi_slopes=slopes, sinks=sinks)
    yield Case("not-causal-window", **heads, seed=56, causal=0, window=20)


def from_torch():
    yield "# Attention by PyTorch in double precision. Made by make.py, which says what the lines mean."
    yield f"# Python {sys.version.split()[0]}, torch {torch.__version__}, numpy {np.__version__}"
    for case in torch_cases():
        out, lse = by_formula(case)
        by = "formula"
        if "soft_cap" not in case.options:
            by, formula, out = "sdpa", out, by_sdpa(case)
            assert abs(out - formula).max() < 1e-13, case.name
        yield from case.head_lines(by)
        yield from row_lines(out, lse)


# onnxruntime


def by_onnxruntime(case):
    """One GroupQueryAttention: all keys but those of the query rows are handed in as the past."""
    helper, floats, option = onnx.helper, onnx.TensorProto.FLOAT, case.options.get
    past = case.len - case.n_q
    how = {"num_heads": case.heads, "kv_num_heads": case.kv_heads}
    if "scale" in case.options:
        how["scale"] = option("scale")
    if "soft_cap" in case.options:
        how["softcap"] = option("soft_cap")
    if "window" in case.options:
        how["local_window_size"] = option("window")
    if not option("causal", 1):
        how["causal"] = 0
    by_head = lambda array: np.ascontiguousarray(array.transpose(1, 0, 2))[None]
    feeds = {
        "query": case.q.reshape(1, case.n_q, -1),
        "key": case.k[past:].reshape(1, case.n_q, -1),
        "value": case.v[past:].reshape(1, case.n_q, -1),
        "past_key": by_head(case.k[:past]),
        "past_value": by_head(case.v[:past]),
        "seqlens_k": np.array([case.len - 1], np.int32),
        "total_sequence_length": np.array([case.len], np.int32),
        "cos_cache": None,
        "sin_cache": None,
        "position_ids": None,
        "attention_bias": case.bias().numpy().astype(np.float32)[None] if "alibi_slopes" in case.options else None,
        "head_sink": np.array(option("sinks"), np.float32) if "sinks" in case.options else None,
    }
    inputs = [name if array is not None else "" for name, array in feeds.items()]
    feeds = {name: array for name, array in feeds.items() if array is not None}
    kinds = {name: onnx.TensorProto.INT32 if array.dtype == np.int32 else floats for name, array in feeds.items()}
    values = [helper.make_tensor_value_info(name, kinds[name], array.shape) for name, array in feeds.items()]
    outputs = ["out", "present_key", "present_value"]
    node = helper.make_node("GroupQueryAttention", inputs, outputs, domain="com.microsoft", **how)
    present = [1, case.kv_heads, case.len, case.k_width]
    shapes = [[1, case.n_q, case.heads * case.v_width], present, present]
    results = [helper.make_tensor_value_info(name, floats, shape) for name, shape in zip(outputs, shapes)]
    graph = helper.make_graph([node], "attention", values, results)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    out = session.run(["out"], feeds)[0]
    return out.reshape(case.n_q, case.heads, case.v_width)


def onnxruntime_cases():
    heads, sinks = dict(sizes=(2, 3, 32, 32, 1, 90)), [0.5, -1.25, 2.0, 3.5, -0.375, 1.0]
    slopes = [1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128]
    yield Case("one-query-head-for-each", (2, 1, 64, 64, 1, 100), 101)
    yield Case("group-of-4", (2, 4, 64, 64, 1, 150), 102)
    yield Case("group-of-8-width-128", (1, 8, 128, 128, 1, 70), 103, "bytes")
    yield Case("whole-prompt", (1, 3, 16, 16, 20, 20), 104)
    yield Case("rows-behind-others", (2, 2, 32, 32, 5, 133), 105, "nibbles")
    yield Case("long", (1, 2, 32, 32, 1, 1100), 106)
    yield Case("scale", **heads, seed=107, scale=0.375)
    yield Case("window", **heads, seed=108, window=17)
    yield Case("window-rows", (2, 2, 32, 32, 4, 90), 109, window=17)
    yield Case("soft-cap", **heads, seed=110, soft_cap=1.5)
    yield Case("sinks", **heads, seed=111, sinks=sinks)
    yield Case("alibi", **heads, seed=112, alibi_slopes=slopes)
    yield Case("not-causal", (2, 2, 32, 32, 2, 60), 114, causal=0)
    yield Case("cap-window-sinks", **heads, seed=113, soft_cap=4.0, window=32, sinks=sinks)


def from_onnxruntime():
    yield "# Attention by onnxruntime's GroupQueryAttention in f32. Made by make.py, which says what the lines mean."
    yield f"# Python {sys.version.split()[0]}, onnxruntime {onnxruntime.__version__}, onnx {onnx.__version__}"
    for case in onnxruntime_cases():
        yield from case.head_lines("GroupQueryAttention")
        yield from row_lines(by_onnxruntime(case), None)


for name, lines in (("torch.txt", from_torch()), ("onnxruntime.txt", from_onnxruntime())):
    with open(os.path.join(HERE, name), "w") as file:
        file.writelines(line + "\n" for line in lines)
    print(name, os.path.getsize(os.path.join(HERE, name)), "bytes")
