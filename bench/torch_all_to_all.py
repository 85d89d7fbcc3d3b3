#!/usr/bin/env python3
"""PyTorch's all_to_all_single over NCCL, a process a GPU: the peer of bench_all_to_all's "message" lines.

    torch_all_to_all.py [--ranks N] [--tokens 4096,8192] [--hidden 7168] [--split 50,70] [--top-k 8]

The same rows (BF16 payload and routing weight, or FP8 payload, scales of 128 values and weight, rounded to 16
bytes), split the same way; rows only, nothing is cast or permuted. Times as there: the host's clock around 6
calls, medians of 5, of the slowest rank.
"""
import argparse
import os
import socket
import statistics
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def measure(call):
    for _ in range(3):
        call()
    samples = []
    for _ in range(5):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(6):
            call()
        torch.cuda.synchronize()
        samples.append((time.perf_counter() - begin) / 6)
    worst = torch.tensor([statistics.median(samples)], device="cuda", dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.item()


def run(rank, port, args):
    ranks = args.ranks
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:%d" % port, rank=rank, world_size=ranks,
                            device_id=torch.device("cuda", rank))
    if rank == 0:
        print("# PyTorch %s, all_to_all_single, NCCL %s, %d ranks" %
              (torch.__version__, ".".join(map(str, torch.cuda.nccl.version())), ranks), flush=True)
    for hidden in args.hidden:
        for tokens in args.tokens:
            for split in args.split:
                rows = tokens * args.top_k
                first = rows * split // 100
                to = [first // (ranks // 2) if r < ranks // 2 else (rows - first) // (ranks - ranks // 2)
                      for r in range(ranks)]
                received = [to[rank]] * ranks
                busiest = max(max(rows - n for n in to), (ranks - 1) * max(to))
                for name, stride in (("bf16", 2 * hidden + 4), ("fp8 + scales", hidden + hidden // 128 * 4 + 4)):
                    stride = (stride + 15) // 16 * 16
                    send = torch.randint(0, 256, (rows, stride), dtype=torch.uint8, device="cuda")
                    land = torch.empty((sum(received), stride), dtype=torch.uint8, device="cuda")
                    seconds = measure(lambda: dist.all_to_all_single(land, send, received, to))
                    if rank == 0:
                        print("%6d %6d %3d/%-3d %-37s %9.3f %8.1f" %
                              (tokens, hidden, split, 100 - split, "PyTorch message " + name, 1e3 * seconds,
                               busiest * stride / seconds / 1e9), flush=True)
    dist.destroy_process_group()


def numbers(text):
    return [int(n) for n in text.split(",")]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--tokens", type=numbers, default=[4096, 8192])
    parser.add_argument("--hidden", type=numbers, default=[7168])
    parser.add_argument("--split", type=numbers, default=[50, 70])
    parser.add_argument("--top-k", type=int, default=8)
    args = parser.parse_args()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(run, args=(port, args), nprocs=args.ranks)


if __name__ == "__main__":
    main()
