#!/usr/bin/env python3
"""Attention for CPUs that comes from PyPI, on the workloads of ../workloads.json.

    python peers.py --workload decode-L8B-4096 --dtype f32 --threads 1 [--peer NAME,..|all] [--json]

One process measures one number of threads. Peers that are not installed are skipped, and said to be.
"""
import argparse, json, os, subprocess, sys, time

ap = argparse.ArgumentParser()
ap.add_argument("--workload", default="")
ap.add_argument("--peer", default="all")
ap.add_argument("--dtype", default="f32")
ap.add_argument("--threads", type=int, default=1)
ap.add_argument("--min-time", type=float, default=2.0)
ap.add_argument("--rotate", type=int, default=1, help="use N copies of the KV cache in turn (cold caches)")
ap.add_argument("--json", action="store_true")
ap.add_argument("--no-check", action="store_true")
ap.add_argument("--list", action="store_true")
A = ap.parse_args()

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(A.threads)
CPUS = sorted(os.sched_getaffinity(0))[: A.threads]
if A.threads == 1 and os.environ.get("PEERS_RT") == "2":
    os.sched_setaffinity(0, CPUS)
if A.threads > 1:
    # On a shared machine the scheduler likes to wake the second worker on the first one's core; a spinning
    # barrier then costs whole time slices. So every peer gets one thread per core.
    os.environ["OMP_PROC_BIND"] = "true"
    os.environ["OMP_PLACES"] = ",".join("{%d}" % c for c in CPUS)
for k in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
    os.environ.pop(k, None)
os.environ.setdefault("OPENBLAS_NUM_THREADS", "2")
import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
DOC = json.load(open(os.environ.get("PEERS_WORKLOADS", os.path.join(HERE, "..", "workloads.json"))))
M64 = (1 << 64) - 1


def gen(tag, shape):
    n = int(np.prod(shape))
    out = np.empty(n, np.float32)
    base = (DOC["seed"] * 0x100000001B3 + tag * 0xD1B54A32D192ED03) & M64
    for s in range(0, n, 1 << 21):
        i = np.arange(s + 1, min(n, s + (1 << 21)) + 1, dtype=np.uint64)
        z = np.uint64(base) + i * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
        u1 = ((z >> np.uint64(32)).astype(np.float64) + 1) / 4294967296.0
        u2 = (z & np.uint64(0xFFFFFFFF)).astype(np.float64) / 4294967296.0
        out[s : s + len(i)] = np.sqrt(-2 * np.log(u1)) * np.cos(2 * np.pi * u2)
    return out.reshape(shape)


class W:
    def __init__(self, d):
        self.__dict__.update(d)
        self.B, self.Q, self.T = self.batch, self.q_len, self.kv_len
        self.H, self.HK, self.D = self.n_heads, self.n_kv_heads, self.head_dim
        self.G = self.H // self.HK
        self.scale = 1.0 / self.D**0.5

    def flops(self):
        rows = sum(self.T - self.Q + i + 1 for i in range(self.Q))
        return 4.0 * self.D * self.H * self.B * rows

    def kv_elems(self):
        return self.B * self.T * self.HK * self.D * 2

    def rows(self):
        n = min(self.Q, 24)
        return [(b, self.Q - 1 if n == 1 else r * (self.Q - 1) // (n - 1)) for b in range(self.B) for r in range(n)]


def reference(w, q, k, v):
    out = []
    kk = [k[b].astype(np.float64) for b in range(w.B)]
    vv = [v[b].astype(np.float64) for b in range(w.B)]
    for b, i in w.rows():
        vis = w.T - w.Q + i + 1
        o = np.empty((w.H, w.D))
        for h in range(w.HK):
            s = q[b, i, h * w.G : (h + 1) * w.G].astype(np.float64) @ kk[b][:vis, h].T * w.scale
            p = np.exp(s - s.max(1, keepdims=True))
            o[h * w.G : (h + 1) * w.G] = (p / p.sum(1, keepdims=True)) @ vv[b][:vis, h]
        out.append(o)
    return out


def max_err(w, out, ref):
    return float(max(np.abs(out[b, i].astype(np.float64) - r).max() for (b, i), r in zip(w.rows(), ref)))


def rounded(x, dt):
    if dt == "f16":
        return x.astype(np.float16).astype(np.float32)
    if dt == "bf16":
        u = x.view(np.uint32)
        return ((u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)).view(np.float32)
    return x


# ---------------------------------------------------------------- peers
# make(w, dt, q, k, v) -> (run(slot), output() -> [B,Q,H,D] f32, bytes_per_elem); raises Skip
class Skip(Exception):
    pass


def torch_():
    import torch

    torch.set_num_threads(A.threads)
    torch.set_grad_enabled(False)
    return torch


def tdt(torch, dt):
    return {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[dt]


def torch_qkv(torch, w, dt, q, k, v, need=("f32", "f16", "bf16")):
    if dt not in need:
        raise Skip("dtype not offered")
    t = tdt(torch, dt)
    Q = torch.from_numpy(q).transpose(1, 2).contiguous().to(t)
    KV = [
        tuple(torch.from_numpy(x).transpose(1, 2).contiguous().to(t).clone() for x in (k, v)) for _ in range(A.rotate)
    ]
    return Q, KV


def chunk_mask(torch, w, t):
    m = torch.full((w.Q, w.T), float("-inf"))
    return torch.triu(m, diagonal=w.T - w.Q + 1).to(t)


def torch_sdpa(w, dt, q, k, v):
    torch = torch_()
    F = torch.nn.functional.scaled_dot_product_attention
    Q, KV = torch_qkv(torch, w, dt, q, k, v)
    causal = w.Q > 1 and w.Q == w.T
    mask = chunk_mask(torch, w, Q.dtype) if w.Q > 1 and not causal else None
    r = {}

    def run(s):
        r["o"] = F(Q, *KV[s], attn_mask=mask, is_causal=causal, enable_gqa=True)

    return run, lambda: r["o"].transpose(1, 2).float().numpy(), Q.element_size()


def torch_sdpa_fold(w, dt, q, k, v):
    """Decode only: the query group becomes the query rows of its KV head."""
    torch = torch_()
    if w.Q != 1:
        raise Skip("decode only")
    F = torch.nn.functional.scaled_dot_product_attention
    Q, KV = torch_qkv(torch, w, dt, q, k, v)
    Qf = Q.reshape(w.B, w.HK, w.G, w.D)
    r = {}

    def run(s):
        r["o"] = F(Qf, *KV[s])

    return run, lambda: r["o"].reshape(w.B, 1, w.H, w.D).float().numpy(), Q.element_size()


def torch_mm(w, dt, q, k, v):
    """Unfused: matmul, softmax, matmul with the group folded into the rows."""
    torch = torch_()
    Q, KV = torch_qkv(torch, w, dt, q, k, v)
    Qf = Q.reshape(w.B, w.HK, w.G * w.Q, w.D)
    mask = chunk_mask(torch, w, Q.dtype) if w.Q > 1 else None
    r = {}

    def run(s):
        K, V = KV[s]
        a = torch.matmul(Qf, K.transpose(2, 3)).mul_(w.scale)
        if mask is not None:
            a.view(w.B, w.HK, w.G, w.Q, w.T).add_(mask)
        r["o"] = torch.matmul(torch.softmax(a, -1), V)

    def out():
        return r["o"].reshape(w.B, w.H, w.Q, w.D).transpose(1, 2).float().numpy()

    return run, out, Q.element_size()


def zentorch_sdpa(w, dt, q, k, v):
    torch = torch_()
    import importlib.util

    spec = importlib.util.find_spec("zentorch")
    if spec is None:
        raise Skip("zentorch not installed")
    torch.ops.load_library(os.path.join(os.path.dirname(spec.origin), "libzentorch.so"))
    Q, KV = torch_qkv(torch, w, dt, q, k, v, ("f32", "bf16"))
    causal = w.Q > 1 and w.Q == w.T
    mask = chunk_mask(torch, w, Q.dtype)[None, None] if w.Q > 1 and not causal else None
    op = torch.ops.zentorch.zentorch_sdpa
    r = {}

    def run(s):
        r["o"] = op(Q, *KV[s], 0.0, causal, attn_mask=mask, scale=w.scale)[0]

    return run, lambda: r["o"].transpose(1, 2).float().numpy(), Q.element_size()


def vllm_cpu(w, dt, q, k, v, block=128, isa="vec"):
    """vLLM's CPU paged attention op, called directly (no vllm import)."""
    torch = torch_()
    import importlib.util, glob

    spec = importlib.util.find_spec("vllm")
    if spec is None:
        raise Skip("vllm-cpu not installed")
    root = list(spec.submodule_search_locations)[0]
    bf = torch.cpu._is_avx512_bf16_supported()
    torch.ops.load_library(os.path.join(root, "_C.abi3.so" if bf else "_C_AVX512.abi3.so"))
    C = torch.ops._C
    kvd, t = ("fp8_e4m3", torch.bfloat16) if dt == "q8" else ("auto", tdt(torch, dt))
    ct = torch.uint8 if dt == "q8" else t
    n = (w.T + block - 1) // block
    perm = np.random.default_rng(7).permutation(w.B * n).astype(np.int32).reshape(w.B, n)
    slots = (perm[:, np.arange(w.T) // block].astype(np.int64) * block + np.arange(w.T) % block).reshape(-1)
    tk, tv = (torch.from_numpy(x).reshape(w.B * w.T, w.HK, w.D).to(t) for x in (k, v))
    caches = []
    for _ in range(A.rotate):
        c = torch.zeros((w.B * n, w.HK, 2 * block, w.D), dtype=ct)
        kc, vc = c.chunk(2, dim=2)
        C.cpu_attn_reshape_and_cache(tk, tv, kc, vc, torch.from_numpy(slots), isa, 1.0, 1.0, kvd)
        caches.append((kc, vc))
    tq = torch.from_numpy(q).reshape(w.B * w.Q, w.H, w.D).to(t)
    o = torch.empty_like(tq)
    qs = torch.arange(0, w.B * w.Q + 1, w.Q, dtype=torch.int32)
    sl = torch.full((w.B,), w.T, dtype=torch.int32)
    bt = torch.from_numpy(perm.copy())
    # vLLM builds this once per step, not once per layer, so it is not timed
    md = C.get_scheduler_metadata(w.B, w.H, w.HK, w.D, sl, t, qs, True, -1, isa, True, None, kvd)

    def run(s):
        kc, vc = caches[s]
        C.cpu_attention_with_kv_cache(
            tq, kc, vc, o, qs, sl, w.scale, True, None, -1, bt, 0.0, md, None, None, 1.0, 1.0, kvd
        )

    return run, lambda: o.reshape(w.B, w.Q, w.H, w.D).float().numpy(), caches[0][0].element_size()


def ipex_paged(w, dt, q, k, v, block=32):
    """Intel's extension for PyTorch (its own environment: torch 2.8)."""
    torch = torch_()
    import importlib.util, logging

    if importlib.util.find_spec("intel_extension_for_pytorch") is None:
        raise Skip("intel-extension-for-pytorch not installed")
    logging.disable(logging.WARNING)
    import intel_extension_for_pytorch  # noqa: F401

    if dt == "q8":
        kvd, t, ct = "fp8_e5m2", torch.bfloat16, torch.float8_e5m2
    else:
        kvd, t = "auto", tdt(torch, dt)
        ct = t
    I = torch.ops.torch_ipex
    n = (w.T + block - 1) // block
    perm = np.random.default_rng(7).permutation(w.B * n).astype(np.int32).reshape(w.B, n)
    slots = (perm[:, np.arange(w.T) // block] * block + np.arange(w.T, dtype=np.int32) % block).reshape(-1).astype(np.int32)
    tk, tv = (torch.from_numpy(x).reshape(w.B * w.T, w.HK, w.D).to(t) for x in (k, v))
    caches = []
    for _ in range(A.rotate):
        kc, vc = (torch.zeros((w.B * n, w.HK, block, w.D), dtype=ct) for _ in "kv")
        I.reshape_and_cache(tk, tv, kc, vc, torch.from_numpy(slots), kvd, 1.0, 1.0)
        caches.append((kc, vc))
    tq = torch.from_numpy(q).reshape(w.B * w.Q, w.H, w.D).to(t)
    o = torch.empty_like(tq)
    bt = torch.from_numpy(perm.copy())
    lens = torch.full((w.B,), w.T, dtype=torch.int32)
    hm = torch.arange(w.HK, dtype=torch.int32).repeat_interleave(w.G)
    cq = torch.arange(0, w.B * w.Q + 1, w.Q, dtype=torch.int32)
    ck = torch.arange(0, w.B * w.T + 1, w.T, dtype=torch.int32)

    def run(s):
        kc, vc = caches[s]
        if w.Q == 1:
            I.single_query_cached_kv_attention(o, tq, kc, vc, hm, w.scale, bt, lens, block, w.T, None, -1, 1.0, 1.0, -1.0)
        else:
            I.flash_attn_varlen_func(o, tq, kc, vc, cq, ck, w.Q, w.T, w.scale, True, bt, None, -1, -1, kvd, 1.0, 1.0, -1.0)

    return run, lambda: o.reshape(w.B, w.Q, w.H, w.D).float().numpy(), caches[0][0].element_size()


def vllm_cpu_vec16(w, dt, q, k, v):
    return vllm_cpu(w, dt, q, k, v, block=16, isa="vec16")


def ort_gqa(w, dt, q, k, v):
    import onnxruntime as ort
    from onnx import TensorProto as TP, helper as oh

    t = {"f32": TP.FLOAT, "f16": TP.FLOAT16, "bf16": TP.BFLOAT16, "q8": TP.FLOAT}[dt]
    ct = TP.INT8 if dt == "q8" else t
    past = w.T - w.Q
    ins = ["query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length"]
    attrs = dict(num_heads=w.H, kv_num_heads=w.HK, scale=w.scale)
    cache = [w.B, w.HK, w.T, w.D]
    vi = [
        oh.make_tensor_value_info("query", t, [w.B, w.Q, w.H * w.D]),
        oh.make_tensor_value_info("key", t, [w.B, w.Q, w.HK * w.D]),
        oh.make_tensor_value_info("value", t, [w.B, w.Q, w.HK * w.D]),
        oh.make_tensor_value_info("past_key", ct, cache),
        oh.make_tensor_value_info("past_value", ct, cache),
        oh.make_tensor_value_info("seqlens_k", TP.INT32, [w.B]),
        oh.make_tensor_value_info("total_sequence_length", TP.INT32, [1]),
    ]
    if dt == "q8":
        ins += [""] * 5 + ["k_scale", "v_scale"]
        attrs.update(kv_cache_bit_width=8, k_quant_type="PER_CHANNEL", v_quant_type="PER_CHANNEL")
        vi += [oh.make_tensor_value_info(x, TP.FLOAT, [w.HK * w.D]) for x in ("k_scale", "v_scale")]
    node = oh.make_node("GroupQueryAttention", ins, ["out", "present_key", "present_value"], domain="com.microsoft", **attrs)
    vo = [
        oh.make_tensor_value_info("out", t, [w.B, w.Q, w.H * w.D]),
        oh.make_tensor_value_info("present_key", ct, cache),
        oh.make_tensor_value_info("present_value", ct, cache),
    ]
    g = oh.make_graph([node], "g", vi, vo)
    m = oh.make_model(g, opset_imports=[oh.make_opsetid("", 17), oh.make_opsetid("com.microsoft", 1)], ir_version=9)
    so = ort.SessionOptions()
    so.intra_op_num_threads = A.threads
    so.inter_op_num_threads = 1
    so.log_severity_level = 3
    if A.threads > 1:
        so.add_session_config_entry("session.intra_op_thread_affinities", ";".join(str(c + 1) for c in CPUS[1:]))
    se = ort.InferenceSession(m.SerializeToString(), so, providers=["CPUExecutionProvider"])

    def val(x):
        if dt == "f16":
            x = x.astype(np.float16)
        elif dt == "bf16":
            import ml_dtypes

            return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(x.astype(ml_dtypes.bfloat16).view(np.uint16), TP.BFLOAT16)
        return ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(x))

    feeds = {
        "query": val(q.reshape(w.B, w.Q, -1)),
        "key": val(k[:, past:].reshape(w.B, w.Q, -1)),
        "value": val(v[:, past:].reshape(w.B, w.Q, -1)),
        "seqlens_k": ort.OrtValue.ortvalue_from_numpy(np.full(w.B, w.T - 1, np.int32)),
        "total_sequence_length": ort.OrtValue.ortvalue_from_numpy(np.array([w.T], np.int32)),
    }
    kt, vt = (np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in (k, v))
    if dt == "q8":
        qz = {}
        for n, x in (("k", kt), ("v", vt)):
            sc = (np.abs(x).max(axis=(0, 2)) / 127.0).astype(np.float32)  # [HK, D]
            qz[n] = np.clip(np.rint(x / sc[None, :, None, :]), -127, 127).astype(np.int8)
            feeds[n + "_scale"] = ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(sc.reshape(-1)))
        kt, vt = qz["k"], qz["v"]
    binds = []
    for _ in range(A.rotate):
        if dt == "q8":
            pk, pv = (ort.OrtValue.ortvalue_from_numpy(x.copy()) for x in (kt, vt))
        else:
            pk, pv = val(kt.copy()), val(vt.copy())
        b = se.io_binding()
        for n, x in feeds.items():
            b.bind_ortvalue_input(n, x)
        b.bind_ortvalue_input("past_key", pk)
        b.bind_ortvalue_input("past_value", pv)
        b.bind_ortvalue_output("present_key", pk)  # shared buffer: appended in place
        b.bind_ortvalue_output("present_value", pv)
        ov = val(np.zeros((w.B, w.Q, w.H * w.D), np.float32))
        b.bind_ortvalue_output("out", ov)
        binds.append((b, ov))

    if A.threads > 1:
        os.sched_setaffinity(0, {CPUS[0]})  # this thread only; the pool's threads have theirs

    def run(s):
        se.run_with_iobinding(binds[s][0])

    def out():
        o = binds[0][1].numpy()
        if dt == "bf16":
            o = (o.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return o.astype(np.float32).reshape(w.B, w.Q, w.H, w.D)

    return run, out, {"f32": 4, "f16": 2, "bf16": 2, "q8": 1}[dt]


def openvino_pa(w, dt, q, k, v, infer=None):
    import openvino as ov
    from openvino import opset13 as ops, Type, PartialShape as PS
    from openvino.op import _PagedAttentionExtension as PA

    kvp = {"f32": "f32", "f16": "f16", "bf16": "bf16", "q8": "u8"}[dt]
    infer = infer or {"f32": "f32", "f16": "f32", "bf16": "bf16", "q8": "f32"}[dt]
    P = lambda n, sh, ty: _named(ops.parameter(PS(sh), ty), n)

    def _named(p, n):
        p.set_friendly_name(n)
        p.output(0).get_tensor().set_names({n})
        return p

    qkv = [P("q", [-1, w.H * w.D], Type.f32), P("k", [-1, w.HK * w.D], Type.f32), P("v", [-1, w.HK * w.D], Type.f32)]
    dyn = Type.dynamic
    kc, vc = P("key_cache.0", [-1, -1, -1, -1], dyn), P("value_cache.0", [-1, -1, -1, -1], dyn)
    pl = P("past_lens", [-1], Type.i32)
    sb = P("subsequence_begins", [-1], Type.i32)
    bi = P("block_indices", [-1], Type.i32)
    bb = P("block_indices_begins", [-1], Type.i32)
    mc = P("max_context_len", [], Type.i32)
    c = lambda x, ty: ops.constant(np.array(x, dtype=ty))
    e = lambda ty, sh=(0,): ops.constant(np.zeros(sh, ty))
    rest = [
        c(w.scale, np.float32), c(0, np.int32), e(np.float32), mc, e(np.int32),  # scale window alibi maxlen score_win
        e(np.int32), e(np.int32, (0, 0)), e(np.float32, (0, 0)),  # rotation
        e(np.float32), c(64, np.int32), c(8, np.int32),  # xattention
        e(np.float32, (0,)),  # sinks
        c(0, np.int32), e(np.int32), e(np.int32), e(np.int32),  # adaptive rkv
        e(np.int32),  # token_type_ids
        e(np.uint8), e(np.int32),  # qq_bias
    ]
    full = qkv + [kc, vc, pl, sb, bi, bb] + rest
    node, errs = None, []
    for n in range(len(full), 12, -1):
        try:
            node = PA([x.output(0) for x in full[:n]])
            break
        except Exception as ex:  # the number of inputs varies with the release
            errs.append(str(ex).strip().splitlines()[-1])
    if node is None:
        raise Skip("PagedAttentionExtension: " + errs[0])
    _set_kv_info(ov, node, w)
    model = ov.Model([ops.result(node.output(0))], qkv + [kc, vc, pl, sb, bi, bb, mc], "pa")
    core = ov.Core()
    cfg = {
        "INFERENCE_PRECISION_HINT": infer, "KV_CACHE_PRECISION": kvp, "INFERENCE_NUM_THREADS": A.threads,
        "NUM_STREAMS": 1, "ENABLE_CPU_PINNING": A.threads > 1,
    }
    cm = core.compile_model(model, "CPU", cfg)
    ish = {list(i.get_names())[0]: i for i in cm.inputs}
    ks, vs = ish["key_cache.0"].get_partial_shape(), ish["value_cache.0"].get_partial_shape()
    kty, vty = ish["key_cache.0"].get_element_type(), ish["value_cache.0"].get_element_type()
    block = ks[2].get_length() if ks[2].is_static else 32
    dims = lambda ps, nb: [nb] + [ps[i].get_length() for i in (1, 2, 3)]
    # by-channel u8 keys keep their scales as extra rows of the block
    tok = 32 if block not in (16, 32, 64, 128) else block
    n = (w.T + tok - 1) // tok
    perm = np.random.default_rng(7).permutation(w.B * n).astype(np.int32).reshape(w.B, n)
    past = w.T - w.Q
    flat = lambda x, a, b: np.ascontiguousarray(x[:, a:b].reshape(w.B * (b - a), -1))
    reqs = []
    for _ in range(A.rotate):
        kt, vt = ov.Tensor(kty, ov.Shape(dims(ks, w.B * n))), ov.Tensor(vty, ov.Shape(dims(vs, w.B * n)))
        r = cm.create_infer_request()
        r.set_tensor("key_cache.0", kt)
        r.set_tensor("value_cache.0", vt)

        def setup(qa, ka, va, pls, sbs, bis, bbs, mx):
            for nm, x in (("q", qa), ("k", ka), ("v", va)):
                r.set_tensor(nm, ov.Tensor(np.ascontiguousarray(x)))
            for nm, x in (("past_lens", pls), ("subsequence_begins", sbs), ("block_indices", bis), ("block_indices_begins", bbs)):
                r.set_tensor(nm, ov.Tensor(np.array(x, np.int32)))
            r.set_tensor("max_context_len", ov.Tensor(np.array(mx, np.int32)))

        # fill the cache in short independent pieces (cheap, whatever the cache's layout)
        step = 16 * tok
        for b in range(w.B):
            for a in range(0, past, step):
                z = min(past, a + step)
                ids = perm[b, a // tok : (z + tok - 1) // tok]
                setup(np.zeros((z - a, w.H * w.D), np.float32), k[b, a:z].reshape(z - a, -1), v[b, a:z].reshape(z - a, -1),
                      [0], [0, z - a], ids, [0, len(ids)], z - a)
                r.infer()
        setup(flat(q, 0, w.Q), flat(k, past, w.T), flat(v, past, w.T), [past] * w.B, np.arange(w.B + 1) * w.Q,
              perm.reshape(-1), np.arange(w.B + 1) * n, w.T)
        reqs.append((r, kt, vt))
    bpe = (kt.byte_size + vt.byte_size) / (2 * w.B * n * tok * w.HK * w.D)

    def run(s):
        reqs[s][0].infer()

    return run, lambda: np.array(reqs[0][0].get_output_tensor(0).data).astype(np.float32).reshape(w.B, w.Q, w.H, w.D), bpe


def _set_kv_info(ov, node, w):
    try:
        ri = node.get_rt_info()
        ri["num_k_heads"], ri["k_head_size"], ri["num_v_heads"], ri["v_head_size"] = w.HK, w.D, w.HK, w.D
    except Exception:
        pass


def openvino_pa_bf16(w, dt, q, k, v):
    if dt != "q8":
        raise Skip("only q8 differs")
    return openvino_pa(w, dt, q, k, v, infer="bf16")


PEERS = {
    "torch-sdpa": torch_sdpa, "torch-sdpa-fold": torch_sdpa_fold, "torch-mm": torch_mm,
    "zentorch-sdpa": zentorch_sdpa, "vllm-cpu": vllm_cpu, "vllm-cpu-vec16": vllm_cpu_vec16, "ort-gqa": ort_gqa, "ipex-paged": ipex_paged,
    "openvino-pa": openvino_pa, "openvino-pa-bf16": openvino_pa_bf16,
}


HOLD = None


def realtime(on):
    """PEERS_RT=1: every thread of this process is real-time while it is timed (root; keep --min-time short).
    PEERS_RT=2: with one thread, a spinner keeps the other core quiet as well (needs PEERS_BIN)."""
    global HOLD
    mode = os.environ.get("PEERS_RT")
    if mode not in ("1", "2"):
        return
    if mode == "2" and A.threads == 1 and os.environ.get("PEERS_BIN"):
        if on:
            HOLD = subprocess.Popen([os.environ["PEERS_BIN"], "--hold"])
            time.sleep(0.02)
        elif HOLD:
            HOLD.kill()
            HOLD.wait()
    for tid in os.listdir("/proc/self/task"):
        try:
            os.sched_setscheduler(int(tid), os.SCHED_FIFO if on else os.SCHED_OTHER, os.sched_param(10 if on else 0))
        except OSError:
            pass


def timed(run):
    t0 = time.perf_counter()
    run(0)
    if time.perf_counter() - t0 > 0.8:
        return timed_(run)  # long ones average the noise; do not hold the machine for them
    realtime(True)
    try:
        return timed_(run)
    finally:
        realtime(False)


def timed_(run):
    t0 = time.perf_counter()
    for i in range(2 * A.rotate):
        run(i % A.rotate)
        if time.perf_counter() - t0 > A.min_time / 2:
            break
    ts, t0 = [], time.perf_counter()
    while time.perf_counter() - t0 < A.min_time:
        a = time.perf_counter()
        run(len(ts) % A.rotate)
        ts.append(time.perf_counter() - a)
    return sorted(ts)


def main():
    if A.list:
        for d in DOC["workloads"]:
            print(d["name"])
        print("peers:", *PEERS)
        return
    pick = lambda s, n: s == "all" or n in s.split(",")
    for d in DOC["workloads"]:
        if not A.workload or not pick(A.workload, d["name"]):
            continue
        w = W(d)
        q, k, v = gen(1, (w.B, w.Q, w.H, w.D)), gen(2, (w.B, w.T, w.HK, w.D)), gen(3, (w.B, w.T, w.HK, w.D))
        ref = None if A.no_check else reference(w, q, k, v)
        for dt in ("f32", "f16", "bf16", "q8"):
            if not pick(A.dtype, dt) or dt not in w.dtypes:
                continue
            rdt = ref
            if ref and dt in ("f16", "bf16"):
                rdt = reference(w, q, rounded(k, dt), rounded(v, dt))
            for name, mk in PEERS.items():
                if not pick(A.peer, name):
                    continue
                try:
                    run, out, bpe = mk(w, dt, q, k, v)
                    run(0)
                    o = out()
                    e32 = max_err(w, o, ref) if ref else None
                    edt = max_err(w, o, rdt) if rdt else None
                    ts = timed(run)
                except Exception as ex:
                    print(f"skip {name} {w.name} {dt}: {type(ex).__name__}: {str(ex).strip()[:300]}", file=sys.stderr)
                    continue
                by = w.kv_elems() * bpe
                rec = dict(
                    peer=name, workload=w.name, dtype=dt, threads=A.threads, rotate=A.rotate, reps=len(ts), min_s=ts[0],
                    median_s=ts[len(ts) // 2], p5_s=ts[len(ts) // 20], kv_bytes=by, gbps=by / ts[0] / 1e9, gflops=w.flops() / ts[0] / 1e9,
                    err_f32=e32, err_dtype=edt, load1=os.getloadavg()[0],
                )
                if A.json:
                    print(json.dumps(rec), flush=True)
                else:
                    print(
                        f"{name:16} {w.name:20} {dt:4} t{A.threads} min {ts[0]*1e6:9.1f} us  med {rec['median_s']*1e6:9.1f} us"
                        f"  {rec['gbps']:6.2f} GB/s  {rec['gflops']:7.2f} GFLOP/s  err {e32 or 0:.1e} / {edt or 0:.1e}  n={len(ts)}",
                        flush=True,
                    )
                del run, out


main()
