"""papermill with a client that hears of each reply of the kernel; as a module it is papermill's command.

Notable: ZeroMQ tells an event loop of a message once, and whoever sends on the same socket takes that news along
(https://github.com/jupyter/nbclient/issues/312). nbclient sends whenever an Output widget shows something, and then
waits, now and then, for ever: for a reply that lies in the socket. On a busy machine two of eighty toy lessons with
such a widget hung so. Asking the socket anew every second finds what lies in it.
"""

import time
from queue import Empty
from typing import Any

from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.channels import AsyncZMQSocketChannel
from jupyter_client.manager import AsyncKernelManager
from papermill.cli import papermill
from papermill.engines import NBClientEngine, papermill_engines
from traitlets import Type

ASK_SECONDS = 1.0  # how long a reply may lie in the socket unheard of


class Channel(AsyncZMQSocketChannel):
    """A channel that looks into its socket every second, whatever it has been told of."""

    async def get_msg(self, timeout: float | None = None) -> dict[str, Any]:
        """Return the next message; queue.Empty if there is none for `timeout` seconds (None: wait for ever)."""
        end = float("inf") if timeout is None else time.monotonic() + timeout
        while (left := end - time.monotonic()) > ASK_SECONDS:
            try:
                return await super().get_msg(ASK_SECONDS)
            except Empty:
                continue
        return await super().get_msg(max(0.0, left))


class Client(AsyncKernelClient):
    """A kernel's client with such channels."""

    shell_channel_class = Type(Channel)
    iopub_channel_class = Type(Channel)


class Manager(AsyncKernelManager):
    """A kernel's manager that makes such clients."""

    client_factory = Type(Client, klass=AsyncKernelClient)


class Engine(NBClientEngine):
    """papermill's own engine with such a manager."""

    @classmethod
    def execute_managed_notebook(cls, nb_man, kernel_name, **options) -> Any:
        """Execute the notebook, as papermill does."""
        return super().execute_managed_notebook(nb_man, kernel_name, kernel_manager_class=Manager, **options)


if __name__ == "__main__":
    papermill_engines.register(None, Engine)  # the one it takes where none is named
    papermill(prog_name="papermill")
