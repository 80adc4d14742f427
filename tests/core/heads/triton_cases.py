"""Runs the Triton kernels in a process of its own: `python -m tests.core.heads.triton_cases interpreter|cuda|compile`.

Triton reads TRITON_INTERPRET when it is imported, and a kernel cannot be wrapped by the tests' checks of shapes: both
ask for a fresh process. Prints one JSON line: case -> quantity -> [largest error, what is allowed].
"""

from __future__ import annotations

import itertools
import json
import sys

import torch
from tests.core.heads.naive import OPTIONS, coefficients, copies, head, naive_logits

DTYPES = ("float32", "bfloat16", "float16")
SIZES = {
    "interpreter": [(37, 20, 75), (1, 3, 5), (16, 16, 32)],
    "cuda": [(300, 200, 5000), (1, 3, 5), (128, 128, 1024)],
}
COMPILED = [(80, "bf16", 2), (90, "bf16", 2), (90, "fp32", 4)]
ALL = ("hidden", "weight", "bias")


def cases(mode: str) -> dict[str, tuple]:
    """Name -> arguments of `compare`."""
    first, *others = SIZES[mode]
    every = [*itertools.product(DTYPES, OPTIONS, ("bias", "plain"), [first])]
    every += itertools.product(DTYPES, OPTIONS[-1:], ("bias",), others)
    return {" ".join(map(str, case)): case for case in every}


def naive(hidden, weight, bias, targets, factor, options):
    """Value, entropy and gradients of naive logits."""
    log_p = naive_logits(hidden, weight, bias, **options).log_softmax(-1)
    value = log_p.gather(1, targets[:, None])[:, 0]
    learned = [x for x in (hidden, weight, bias) if x is not None]
    return [value, -(log_p.exp() * log_p).sum(-1), *torch.autograd.grad(value @ factor.to(value), learned)]


def compare(dtype: str, options: dict, bias: str, size: tuple[int, ...], device: str) -> dict:
    """Largest error of every result; allowed is twice that of the naive head in the same type, and one rounding."""
    from klamp.core.heads.logprobs import linear_logprobs

    given = [x.detach().to(device).requires_grad_(True) for x in head(*size, dtype=getattr(torch, dtype))[:3]]
    given[2] = given[2] if bias == "bias" else None
    targets, factor = head(*size)[3].to(device), coefficients(size[0], torch.float32).to(device)
    value, entropy = linear_logprobs(*given[:2], targets, bias=given[2], return_entropy=True, **options)
    learned = [x for x in given if x is not None]
    ours = [value, entropy, *torch.autograd.grad(value @ factor, learned)]
    plain = naive(*given, targets, factor, options)
    exact = iter(copies(learned))
    truth = naive(*(None if x is None else next(exact) for x in given), targets, factor, options)
    found = {}
    for name, a, b, true in zip(("value", "entropy", *ALL), ours, plain, truth, strict=False):
        error, error_of_naive = ((x.double() - true).abs().max().item() for x in (a, b))
        same = a.shape == true.shape and a.dtype == b.dtype and bool(a.isfinite().all())
        rounding = torch.finfo(a.dtype).eps / 2 * true.abs().max().item()
        found[name] = [error if same else float("inf"), 2 * error_of_naive + rounding + 2e-5]
    return found


def some_head(device: str):
    """Hidden states, weight, bias and targets of a head that does not learn yet."""
    return [x.detach().to(device) for x in head(18, 20, 50, dtype=torch.float32)]


def gradient_error(change=None, factor=None, learned=ALL, device="cpu") -> list[float]:
    """Largest error of the gradients for inputs that are changed first; rows with factor 0 have no part."""
    from klamp.core.heads.logprobs import linear_logprobs

    given = dict(zip((*ALL, "targets"), some_head(device), strict=True))
    given = change(given) if change else given
    factor = torch.ones(()).expand(18) if factor is None else factor
    factor, kept = factor.to(device), factor.to(device) != 0
    wanted = [given[name].requires_grad_(True) for name in learned]
    ours = linear_logprobs(given["hidden"], given["weight"], given["targets"], bias=given["bias"])
    logits = naive_logits(given["hidden"][kept], given["weight"], given["bias"])
    truth = logits.log_softmax(-1).gather(1, given["targets"][kept][:, None])[:, 0]
    pairs = zip(
        torch.autograd.grad(ours, wanted, factor), torch.autograd.grad(truth @ factor[kept], wanted), strict=True
    )
    # The naive gradient of a row that it never saw is 0 * NaN = NaN there; klamp's must be 0.
    return [max((a - b.nan_to_num()).abs().max().item() for a, b in pairs), 2e-5]


def odd_inputs(device: str) -> dict:
    """Strides of every kind, rows that do not learn, NaN in one of them, and a frozen head."""

    def strided(given):
        return {k: x if k == "weight" else torch.stack([x, x], -1)[..., 0] for k, x in given.items()}

    def poisoned(given):
        given["hidden"][4] = float("nan")
        return given

    some = (torch.arange(18) % 3 != 1).float()
    return {
        "expanded gradient": gradient_error(device=device),
        "strided": gradient_error(strided, torch.ones(18), device=device),
        "skipped rows": gradient_error(poisoned, some, device=device),
        "no row": [gradient_error(factor=torch.zeros(18), device=device)[0], 0.0],
        "frozen head": gradient_error(factor=coefficients(18, torch.float32), learned=("hidden",), device=device),
    }


def forbidden_entries(device: str) -> dict:
    """Entries with a bias of -inf."""
    from klamp.core.heads.logprobs import linear_logprobs

    hidden, weight, bias, targets = some_head(device)
    bias[21:] = -float("inf")
    hidden, targets = hidden.requires_grad_(True), targets % 21
    value, entropy = linear_logprobs(hidden, weight, targets, bias=bias, return_entropy=True)
    log_p = naive_logits(hidden, weight[:21], bias[:21]).log_softmax(-1)
    truth = log_p.gather(1, targets[:, None])[:, 0]
    slopes = [torch.autograd.grad(x.sum(), hidden, retain_graph=True)[0] for x in (value, truth)]
    pairs = {"value": (value, truth), "entropy": (entropy, -(log_p.exp() * log_p).sum(1)), "gradient": slopes}
    return {name: [(a - b).abs().max().item(), 2e-5] for name, (a, b) in pairs.items()}


def extreme_logits(device: str) -> dict:
    """Log-probabilities of thousands of nats."""
    from klamp.core.heads.logprobs import linear_logprobs

    hidden, weight, _, targets = some_head(device)
    hidden *= 200
    value, entropy = linear_logprobs(hidden, weight, targets, return_entropy=True)
    truth = naive_logits(hidden.double(), weight.double()).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    finite = bool(entropy.isfinite().all()) and bool((entropy >= 0).all()) and bool((value <= 0).all())
    error = ((value - truth) / truth.clamp(max=-1)).abs().max().item()
    return {"relative": [error if finite and truth.min() < -1e3 else float("inf"), 1e-5]}


def small_tiles(device: str) -> dict:
    """Several tiles of rows and entries in the backward pass."""
    from klamp.core.heads import tiles

    before = tiles.TILE_ROWS, tiles.TILE_BYTES
    tiles.TILE_ROWS, tiles.TILE_BYTES = 5, 5 * 11 * 4 if device == "cpu" else 5 * 11 * 4 / 64
    found = compare("float32", {}, "bias", (18, 20, 50), device)
    tiles.TILE_ROWS, tiles.TILE_BYTES = before
    return found


GROUPS = {
    "odd inputs": odd_inputs,
    "forbidden entries": forbidden_entries,
    "extreme logits": extreme_logits,
    "small tiles": small_tiles,
}


def run(mode: str) -> dict:
    """Every case through the interpreter on a CPU, or on a GPU."""
    device = "cuda"
    if mode == "interpreter":
        from klamp.core.heads import _triton, logprobs

        device = "cpu"
        _triton.BLOCKS = {2: (32, 16, 16, 4, 2), 4: (16, 32, 16, 4, 2)}  # ragged blocks at small sizes
        _triton.PROGRAMS = 6
        logprobs._kernels = lambda *_: _triton
    found = {name: compare(*case, device) for name, case in cases(mode).items()}
    return found | {name: group(device) for name, group in GROUPS.items()}


def compile_for(architecture: int, dtype: str, size: int) -> dict:
    """Bytes of shared memory of each kernel, with everything switched on, compiled for a GPU that need not be there."""
    import triton
    from triton.backends import compiler
    from triton.compiler import ASTSource

    from klamp.core.heads import _triton as kernels

    rows, columns, width, warps, stages = kernels.BLOCKS[size]
    given = dict.fromkeys(("hidden", "weight", "bias", "out"), f"*{dtype}") | {"targets": "*i64"}
    given |= dict.fromkeys(("normalisers", "entropies", "picked", "grad", "normaliser", "rest"), "*fp32")
    given |= dict.fromkeys(("temperature", "softcap"), "fp32")
    found = {}
    for kernel in (kernels._score_kernel, kernels._gradient_kernel):
        constants = {"HAS_BIAS": True, "HAS_CAP": True, "WIDEN": False, "ENTROPY": True}
        constants |= {"ROWS": rows, "COLUMNS": columns, "WIDTH": width}
        constants = {name: x for name, x in constants.items() if name in kernel.arg_names}
        signature = {x: "constexpr" if x in constants else given.get(x, "i32") for x in kernel.arg_names}
        aligned = {(i,): [["tt.divisibility", 16]] for i, x in enumerate(kernel.arg_names) if x not in constants}
        aligned = {i: x for i, x in aligned.items() if signature[kernel.arg_names[i[0]]] != "fp32"}
        if hasattr(compiler, "AttrsDescriptor"):  # before Triton 3.3
            aligned = compiler.AttrsDescriptor.from_hints({i: 16 for (i,) in aligned})
            signature = {name: kind for name, kind in signature.items() if kind != "constexpr"}
        source = ASTSource(kernel, signature, constants, aligned)
        options = {"num_warps": warps, "num_stages": stages}
        built = triton.compile(source, target=compiler.GPUTarget("cuda", architecture, 32), options=options)
        found[kernel.__name__] = [built.metadata.shared if built.asm["cubin"] else float("inf"), 99 * 1024]
    return found


def main(mode: str) -> None:
    """The cases of a mode."""
    if mode == "compile":
        print(json.dumps({f"sm_{case[0]} {case[1]}": compile_for(*case) for case in COMPILED}))
    else:
        print(json.dumps(run(mode)))


if __name__ == "__main__":
    main(sys.argv[1])  # noqa: TID251
