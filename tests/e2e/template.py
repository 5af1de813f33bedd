"""A process that has imported vLLM and forks the first process of engines; run as `template.py FD`.

Importing is most of what an engine's start costs, in each of its processes. Those that are forked from here
have it behind them, and fork the others of their engine instead of starting them afresh. Nothing is computed
here and no thread is started, so that a fork is a sound process. The end of the requests ends this process.

A request is the environment, with the descriptors of the commands, the answers and the log; the answer is the
pid. The system itself reaps who has ended.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys

REQUEST_BYTES = 1 << 18


def main() -> None:
    import vllm.v1.engine.core
    import vllm.v1.executor.multiproc_executor
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm import LLM  # noqa: F401

    import umbp.connector  # noqa: F401
    from e2e import child

    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    while True:
        request, descriptors, _, _ = socket.recv_fds(connection, REQUEST_BYTES, 3)
        if not request:
            os._exit(0)  # an orderly end only tells of what the extensions have left behind
        pid = os.fork()
        if pid == 0:
            break
        for each in descriptors:
            os.close(each)
        connection.send(str(pid).encode())
    connection.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setpgid(0, 0)
    commands, answers, log = descriptors
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.clear()
    os.environ.update(json.loads(request))
    child.serve(commands, answers, forks=True)


if __name__ == "__main__":
    main()
