"""The experts of one layer side by side with the other ways to run them that are installed here.

python examples/bench_experts.py [--shape 2048,512,32,8] [--tokens 1,16,64] [--dtype bfloat16] [--seconds 2]
"""

from __future__ import annotations

import argparse

from moefx import bench


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="2048,512,32,8", help="hidden, intermediate, experts, top-k")
    parser.add_argument("--tokens", default="1,16,64")
    parser.add_argument("--dtype", default="bfloat16", choices=bench.DTYPES)
    parser.add_argument("--seconds", type=float, default=2.0, help="about how long each number of tokens is timed")
    options = parser.parse_args(arguments)
    shape, tokens = ([int(n) for n in text.split(",")] for text in (options.shape, options.tokens))
    print(bench.text(bench.bench(shape, tokens, options.dtype, seconds=options.seconds)))


if __name__ == "__main__":
    main()
