"""Two ranks, of which the second dies in a chosen way while the first waits for something else.

    torchrun --standalone --shutdown-timeout 3600 --nproc_per_node 2 tests/dying.py kill
"""
import os
import signal
import sys
import threading
import time

import torch.distributed as dist

import zero3

dist.init_process_group("gloo")
zero3.watch_ranks()
interrupted = zero3.watch_sigterm()
way = sys.argv[1]
dist.barrier()
if dist.get_rank() == 1:
    if way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "hang":  # its threads keep a process alive that has raised an exception
        threading.Thread(target=time.sleep, args=(3000,)).start()
        raise ValueError("a slip in the world")
    time.sleep(20)  # "slow"
elif way == "kill":
    time.sleep(3000)
elif way == "hang":
    dist.distributed_c10d._get_default_store().wait(["never"])
dist.barrier()
dist.destroy_process_group()
time.sleep(20 * (int(os.environ["RANK"]) == 0))  # as at the end of a run: the other has left
print(way, "ended in order")
