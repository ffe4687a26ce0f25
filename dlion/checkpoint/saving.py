"""A checkpoint on its way to the disk, while training goes on."""

import threading
from collections.abc import Callable
from pathlib import Path


class Saving:
    """What `dlion.checkpoint.save` returns, on every worker.

    A process that ends regularly writes it to its end first.

    Attributes:
        path: of the checkpoint.
        held_up: seconds for which `save` held up its caller: waiting for the checkpoint before this one, and copying.
    """

    def __init__(self, path: Path, write: Callable[[], None]) -> None:
        self.path = path
        self.held_up = 0.0
        self.asked = False  # whether anybody heard how it ended
        self._write = write
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"dlion checkpoint {path.name}")
        self._thread.start()

    def __repr__(self) -> str:
        how = "under way" if not self.done else "failed" if self._error is not None else "complete"
        return f"<checkpoint {self.path}: {how}>"

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:
            self._error = error
        finally:
            del self._write  # and with it the copies

    @property
    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return not self._thread.is_alive()

    @property
    def error(self) -> BaseException | None:
        """What went wrong, once it is done."""
        return self._error

    def wait(self) -> None:
        """Return when the checkpoint is complete and on the disk.

        Raises:
            CheckpointError: it is not, on any worker; those of before are as they were.
            ExchangeError: a worker was lost.
        """
        self.ended()
        self.asked = True
        if self._error is not None:
            raise self._error

    def ended(self) -> None:
        """Return when nothing is written any more, well or not."""
        self._thread.join()
