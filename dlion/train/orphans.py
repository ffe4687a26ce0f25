"""Workers whose launcher is gone: nobody is left who could stop them, or hear how they end."""

import multiprocessing
import os
import threading

FAILED = 1


def end_with_launcher() -> None:
    """Let this process, which multiprocessing has started, end when the one that asked for it does, however that ends.

    The kernel's own way (PR_SET_PDEATHSIG) is about the direct parent, which may be a server that forks, and about
    launchers that die after it was asked for.
    """
    launcher = multiprocessing.parent_process()
    if launcher is None:
        return

    def wait() -> None:
        launcher.join()
        os._exit(FAILED)

    threading.Thread(target=wait, daemon=True, name="dlion launcher").start()
