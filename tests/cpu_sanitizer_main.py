"""The CPU kernel built with address and undefined-behaviour sanitizers, over sizes that reach past every tile. Argument: a folder."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from test_kernels_fp8 import weights

from moefx.activation.spec import Activation
from moefx.kernels.cpu import build, kernel

FLAGS = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def main(folder: Path) -> None:
    compiler = shutil.which("c++")
    assert compiler is not None
    for isa in [i for i, flags in build.INSTRUCTIONS.items() if set(flags) <= build.cpu_flags()]:
        target = folder / f"{isa}.so"
        subprocess.run(build.command(compiler, "experts", isa, target, FLAGS), check=True, env={"PATH": "/usr/bin:/bin"})
        use(isa, ctypes.CDLL(str(target)))
        for k, (hidden, width), tokens in itertools.product(kernel.KERNELS, [(200, 70), (33, 31)], [0, 1, 9, 40]):
            if k.name == "cpu_int8" and isa != "avx512_bf16":
                continue
            act = Activation("swiglu", "interleaved")
            made = weights(act, 3, hidden, width, bias=True, dtype=torch.bfloat16)
            x, ids = torch.randn(tokens, hidden).bfloat16(), torch.randint(-1, 4, (tokens, 2))
            packed = k.pack(*made, act.encode())
            assert k.op(x, ids, torch.rand(tokens, 2), *packed, act.encode(), 0).isfinite().all()
            if k.name == "cpu_packed":
                assert torch.equal(kernel.unpack(packed, hidden, width, act.encode())[2], made[2])
    print("clean")


def use(isa: str, library: ctypes.CDLL) -> None:
    build.isa = lambda name="experts": isa
    build.library = lambda name, isa: library


if __name__ == "__main__":
    main(Path(sys.argv[1]))
