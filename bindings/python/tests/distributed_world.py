"""Ranks in processes of their own, and what they found."""

import datetime
import json
import os
import traceback

import torch
import torch.distributed as dist


class World:
    """`world` processes, forked, each of which runs `run(rank, found)`: {name of a case: None, or what was wrong}."""

    def __init__(self, run, folder, world, backend="gloo"):
        self.folder, self.world, self.backend, self.children = folder, world, backend, []
        os.makedirs(folder)
        for rank in range(world):
            pid = os.fork()
            if not pid:
                self.be(rank, run)
            self.children.append(pid)

    def be(self, rank, run):
        found = {}
        try:
            torch.set_num_threads(1)
            if self.backend == "nccl":
                torch.cuda.set_device(rank)
            timeout, store = datetime.timedelta(seconds=60), f"file://{self.folder}/store"
            dist.init_process_group(self.backend, init_method=store, rank=rank, world_size=self.world, timeout=timeout)
            run(rank, found)
        except BaseException:
            found[""] = traceback.format_exc()
        with open(f"{self.folder}/{rank}.json", "w") as file:
            json.dump(found, file)
        os._exit(0)

    def found(self):
        """Of all ranks together. One that was lost has found nothing."""
        together = {}
        for rank, pid in enumerate(self.children):
            os.waitpid(pid, 0)
            path = f"{self.folder}/{rank}.json"
            if not os.path.exists(path):
                continue
            with open(path) as file:
                for name, message in json.load(file).items():
                    if message is not None or name not in together:
                        together[name] = message if message is None else f"rank {rank}: {message}"
        return together
