"""What the tests of listening sockets count."""

import os
import socket

from tests.hostile.runs_of_ranks import listeners


def test_a_child_that_is_not_yet_another_program_is_not_counted_beside_its_parent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        wait, go = os.pipe()
        child = os.fork()
        if child == 0:  # what `subprocess` is between its fork and its exec
            os.read(wait, 1)
            os._exit(0)
        try:
            place = (os.getpid(), *server.getsockname())
            assert [one for one in listeners(os.getpid()) if one[2] == place[2]] == [place]
        finally:
            os.write(go, b"1")
            os.waitpid(child, 0)
            os.close(wait)
            os.close(go)
