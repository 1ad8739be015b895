# SPDX-License-Identifier: Apache-2.0
"""Prints what a program can see of how it was started, before and after torch is there."""

import atexit
import os
import pickle
import signal
import sys
import threading
import time

os.environ["OMP_NUM_THREADS"] = "2"
assert "torch" not in sys.modules

import torch  # noqa: E402


class Record:
    pass


def later() -> None:
    time.sleep(0.2)
    print("thread", type(pickle.loads(pickle.dumps(Record()))) is Record)


atexit.register(lambda: print("at exit", Record.__name__))
threading.Thread(target=later).start()
main = sys.modules["__main__"]
print("argv", sys.argv)
print("path", sys.path[0])
print("name", __name__, __package__, __file__, __spec__ and __spec__.name, main.__dict__ is globals())
print("loader", type(__loader__).__name__, torch.__spec__.loader.__class__.__name__)
print("threads", torch.get_num_threads())
print("hook", sys.excepthook is sys.__excepthook__, signal.getsignal(signal.SIGINT) is signal.default_int_handler)
