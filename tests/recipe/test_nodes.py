"""What cleans up a node ends itself, and so wakes the reaper, once the node has lost the network."""

import socket
import subprocess
import sys

import pytest

from tests.kit import ROOT

LOOK_S, CUT_OFF_S = 0.2, 2.0
WATCH = "import sys; from recipe.fully_async_policy.launch.nodes import end_when_cut_off; end_when_cut_off({arguments})"


def test_it_stays_while_the_head_is_reached_and_ends_when_it_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=1000) as head:
        arguments = f"'127.0.0.1:{head.getsockname()[1]}', {LOOK_S}, {CUT_OFF_S}"
        watch = subprocess.Popen([sys.executable, "-c", WATCH.format(arguments=arguments)], cwd=ROOT)
        head.settimeout(60)
        head.accept()  # it is up
        with pytest.raises(subprocess.TimeoutExpired):
            watch.wait(2 * CUT_OFF_S)
    assert watch.wait(30) == 1
