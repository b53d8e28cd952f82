"""The client that executes lessons receives every reply."""

import asyncio
import time
from queue import Empty

import nbformat
import pytest
import zmq
import zmq.asyncio
from jupyter_client.channels import AsyncZMQSocketChannel
from jupyter_client.session import Session
from nbclient import NotebookClient

from perf_helpers.course.lesson_process import POLL_SECONDS, polling


class Channel(AsyncZMQSocketChannel):
    get_msg = polling(AsyncZMQSocketChannel.get_msg)


async def received(channel_class, timeout):
    """Send a reply to a client while the client is sending; return (type of the reply that it gets, seconds it waited).

    Args:
        channel_class: the client's channel, Jupyter's or one that polls.
        timeout: seconds that the client waits at most.
    """
    session, context = Session(), zmq.asyncio.Context()
    kernel, client = zmq.Context.instance().socket(zmq.ROUTER), context.socket(zmq.DEALER)
    try:
        client.connect(f"tcp://127.0.0.1:{kernel.bind_to_random_port('tcp://127.0.0.1')}")
        channel = channel_class(client, session, asyncio.get_running_loop())
        channel.send(session.msg("execute_request"))
        address, *_ = kernel.recv_multipart()
        waiting = asyncio.ensure_future(channel.get_msg(timeout))
        await asyncio.sleep(0.2)  # it waits now
        session.send(kernel, "execute_reply", ident=address)
        time.sleep(1)  # the loop does not run while the reply comes in ...
        channel.send(session.msg("comm_msg"))  # ... and then sends, as nbclient's Output widget does
        since = time.monotonic()
        message = await waiting
        return message["header"]["msg_type"], time.monotonic() - since
    finally:
        kernel.close(0)
        client.close(0)
        context.term()


def test_a_reply_that_came_while_sending_is_heard_a_second_later():
    kind, seconds = asyncio.run(received(Channel, timeout=None))
    assert kind == "execute_reply" and seconds < 3 * POLL_SECONDS


@pytest.mark.nightly
def test_jupyters_own_channel_hears_it_only_when_its_time_is_over():
    """Jupyter's own channel notices a reply of the kernel only after its timeout, although the reply came earlier. If
    this test fails, Jupyter has fixed this fault, and `polling` can be removed.
    """
    _, seconds = asyncio.run(received(AsyncZMQSocketChannel, timeout=6.0))
    assert seconds > 3


@pytest.mark.parametrize("timeout", [0.0, 0.3, 1.3])
def test_it_waits_as_long_as_requested(timeout):
    async def wait():
        context = zmq.asyncio.Context()
        with context.socket(zmq.DEALER) as socket:
            await Channel(socket, Session(), asyncio.get_running_loop()).get_msg(timeout)

    since = time.monotonic()
    with pytest.raises(Empty):
        asyncio.run(wait())
    assert timeout - 0.05 <= time.monotonic() - since < timeout + 1


def test_it_is_the_channel_of_the_client_that_papermill_takes():
    client = NotebookClient(nbformat.v4.new_notebook()).create_kernel_manager().client()
    assert client.shell_channel_class is client.iopub_channel_class is AsyncZMQSocketChannel
