"""A forked child can use nothing of its parent's pool and breaks nothing of it (scenario 30)."""

from __future__ import annotations

import json

from support.process import start_python

CODE = """
import gc, json, os, signal, threading
import numpy as np
from kvferry.drivers.errors import ForkedProcess
from kvferry.hostpool import HostPool, KVLayout
from kvferry.hostpool.backend import stand_in
from support.standin import GuardedCache, new_stream

backend = stand_in()
layout = KVLayout.mla(layers=2, latent_size=8, element_nbytes=2, page_tokens=4)
pool = HostPool(layout, 4, backend=backend)
cache = GuardedCache(backend, layout, 16, seed=1)
kv, stream = cache.pool(pool), new_stream(backend)
ticket = pool.store(kv, [0, 1, 2, 3], [3, 2, 1, 0], stream=stream)
ticket.join()
before = np.stack([pool.page_view(page) for page in range(4)]).copy()
late = pool.store(kv, [0], [3], stream=stream)
engine_lock = pool._resources.devices[0].engine._lock

read, write = os.pipe()
inside, outside = threading.Event(), threading.Event()

def hold() -> None:  # another thread is inside at the fork: in the child nobody will ever let go of this lock
    with engine_lock:
        inside.set()
        outside.wait()

threading.Thread(target=hold, daemon=True).start()
inside.wait()
child = os.fork()
if child == 0:
    signal.alarm(20)
    said = {}
    def told(name, use):
        try:
            use()
            said[name] = "nothing"
        except ForkedProcess as error:
            said[name] = "ForkedProcess"
        except BaseException as error:
            said[name] = repr(error)
    told("store", lambda: pool.store(kv, [0], [0], stream=stream))
    told("load", lambda: pool.load(kv, [0], [0], stream=stream))
    told("view", lambda: pool.page_view(0))
    told("allocate", lambda: pool.allocate(1))
    told("query", late.query)
    told("synchronize", late.synchronize)
    told("wait", lambda: late.wait(stream + 1))
    told("pool", lambda: HostPool(layout, 4, backend=backend))
    pool.close()
    del pool, kv, late, ticket
    gc.collect()
    os.write(write, json.dumps(said).encode())
    os.close(write)
    raise SystemExit(0)  # through atexit and every finalizer
outside.set()
os.close(write)
said = os.fdopen(read).read()
_, status = os.waitpid(child, 0)
late.synchronize()
same = bool((np.stack([pool.page_view(page) for page in range(4)]) == before).all())
cache.scramble(9)
pool.load(kv, [3, 2, 1, 0], [0, 1, 2, 3], stream=stream).synchronize()
pool.store(kv, [0, 1, 2, 3], [3, 2, 1, 0], stream=stream).synchronize()
works = bool((np.stack([pool.page_view(page) for page in range(4)]) == before).all())
pool.close()
print(json.dumps({"said": json.loads(said), "status": status, "same": same, "works": works}))
"""


def test_a_child_is_told_and_the_parent_goes_on() -> None:
    done = start_python("import warnings; warnings.simplefilter('ignore', DeprecationWarning)\n" + CODE)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    said = found.pop("said")
    assert found == {"status": 0, "same": True, "works": True}
    assert set(said.values()) == {"ForkedProcess"}, said
