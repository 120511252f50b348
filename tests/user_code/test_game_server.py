"""examples/guessing: an agent loop plays on a game server, and a server that fails is never a reward."""

import asyncio
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import DictConfig
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, DictConfigWrap
from verl.trainer.ppo.v1 import agent_loop_tq
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.rollout.replica import TokenOutput

from examples.guessing import loop, rows
from examples.guessing.loop import GuessingLoop
from examples.guessing.server import GUESSES, HIGHEST, Game, GameServer
from recipe.fully_async_policy import main
from recipe.warm_start.tokenizer import byte_tokenizer, prompt_text
from tests.kit import ROOT
from tests.loop.test_agent_loop import VERLS_WORKER, worker_of
from verl_vcpo.samplers import agent_loop

Player = Callable[[str], str]
"""What the model writes next, after this text."""


@pytest.fixture
def server() -> Iterator[GameServer]:
    game = GameServer()
    threading.Thread(target=game.serve_forever, args=(0.01,), daemon=True).start()
    yield game
    game.shutdown()
    game.server_close()


def halving(text: str) -> str:
    """The guess that halves the numbers that are left."""
    low, high = 1, HIGHEST
    for said in text.split("user\n")[2:]:
        guess = (low + high) // 2
        low, high = (guess + 1, high) if said.startswith("higher") else (low, guess - 1)
    return f"{(low + high) // 2}<|im_end|>"


@cache
def composed(*settings: str) -> DictConfig:
    """The configuration of the example's preset."""
    arguments = ["+task=guessing", "hardware=cpu", *settings]
    main.prepare_environment(arguments)
    return main.compose(arguments, ROOT / "examples/guessing")


def game_loop(url: str, player: Player, *settings: str) -> GuessingLoop:
    """The loop of the example's preset, with this player as its samplers; each turn is of a newer policy."""
    config = composed(f"actor_rollout_ref.rollout.custom.game_url={url}", *settings)
    tokenizer, turns = byte_tokenizer([]), iter(range(3, 10))

    async def generate(request_id: str, prompt_ids: list[int], sampling_params: Any, priority: int) -> TokenOutput:
        tokens = tokenizer(player(tokenizer.decode(prompt_ids)))["input_ids"][: sampling_params["max_tokens"]]
        versions = dict.fromkeys(("min_global_steps", "max_global_steps"), next(turns))
        return TokenOutput(token_ids=tokens, log_probs=[-0.5] * len(tokens), extra_fields=versions)

    samplers, data = SimpleNamespace(generate=generate), DictConfigWrap(config.data)
    return GuessingLoop(DictConfigWrap(config), samplers, tokenizer, None, RLHFDataset, data, "qwen2")


def played(url: str, player: Player, *settings: str, game: int = 4000) -> tuple[AgentLoopOutput, str, str]:
    """What the loop returned, the whole text, and what of it the model wrote."""
    row = {"raw_prompt": rows.row(game)["prompt"], "extra_info": {"index": game}}
    of_example = game_loop(url, player, *settings)
    of_example.loop = asyncio.new_event_loop()
    output = of_example.loop.run_until_complete(of_example.run({}, **row))
    sampled = [token for token, mask in zip(output.response_ids, output.response_mask, strict=True) if mask]
    decode = of_example.tokenizer.decode
    return output, decode(output.prompt_ids + output.response_ids), decode(sampled)


def test_an_episode_is_played_over_several_turns(server: GameServer) -> None:
    scores, turns = [], []
    for game in range(4000, 4008):
        output, whole, sampled = played(server.url, halving, game=game)
        lesson = rows.row(game)["prompt"]
        assert whole.startswith(prompt_text(byte_tokenizer([]), lesson)), "a turn looks as the lessons show it"
        assert whole.endswith(sampled.split("<|im_end|>")[-2] + "<|im_end|>"), "the response ends with a move"
        turns.append(sampled.count("<|im_end|>"))
        assert whole.count("<|im_start|>user\n") == whole.count("<|im_start|>assistant\n") == turns[-1]
        assert [bool(value) for value in output.response_logprobs] == [bool(mask) for mask in output.response_mask]
        assert output.extra_fields["min_global_steps"] == 3
        assert output.extra_fields["max_global_steps"] == 2 + turns[-1] and output.num_turns == 2 * turns[-1]
        assert not output.extra_fields["truncated"]
        scores.append(output.reward_score)
    assert scores == [1.0] * 8 and max(turns) > 2, "halving finds every number"
    assert server.game.episodes == {}


def test_an_episode_may_be_lost_or_cut_off(server: GameServer) -> None:
    output, whole, _ = played(server.url, lambda _: "I do not know.<|im_end|>")
    assert output.reward_score == 0 and whole.count("no number") == GUESSES - 1
    output, _, sampled = played(server.url, lambda _: "99<|im_end|>", "data.max_response_length=32")
    assert output.extra_fields["truncated"] and sampled == "99<|im_end|>" and output.reward_score == 0


def reason(monkeypatch: pytest.MonkeyPatch, url: str, player: Player = halving) -> str | None:
    """Why the worker calls the prompt failed, which is then sampled again; None where it has a trajectory."""
    reasons: list[str] = []

    async def put(key: str, partition_id: str, tag: dict[str, Any]) -> None:
        reasons.extend(tag[name] for name in tag if name == agent_loop.REASON)

    async def respond(self: Any, sampling_params: Any, trajectory: Any, **row: Any) -> None:
        output = await game_loop(url, player).run({}, **row)
        assert output.reward_score is not None

    monkeypatch.setattr(loop, "_PAUSES_S", (0.01,))
    monkeypatch.setattr(agent_loop_tq.tq, "async_kv_put", put)
    monkeypatch.setattr(VERLS_WORKER, "_run_agent_loop", respond)
    row = rows.row(4000)
    prompt = {"uid": "u", "raw_prompt": row["prompt"], "extra_info": row["extra_info"]}
    asyncio.run(worker_of(1)._run_prompt(prompt, {}, {"validate": False, "step": 1, "sample_index": 0}))
    return reasons[0] if reasons else None


def test_a_server_that_fails_is_no_reward(server: GameServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reason(monkeypatch, server.url) is None
    assert "ClientConnectorError" in str(reason(monkeypatch, "http://127.0.0.1:9"))

    def forgetful(text: str) -> str:
        server.game = Game()  # as one that was started again
        return halving(text)

    assert "400" in str(reason(monkeypatch, server.url, forgetful))
    monkeypatch.setattr(server.game, "step", lambda **_: 1 / 0)
    assert "ServerDisconnectedError" in str(reason(monkeypatch, server.url))
    waits = threading.Event()
    monkeypatch.setattr(server.game, "step", lambda **_: waits.wait(60) and {})
    monkeypatch.setattr(loop, "_REQUEST_LIMIT", loop.ClientTimeout(total=0.5))
    assert "TimeoutError" in str(reason(monkeypatch, server.url))
    waits.set()


def test_a_player_that_hangs_up_leaves_no_traceback(
    server: GameServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trajectory that is stopped, because its prompt is sampled again, resets its connection."""

    def asked(text: bytes) -> str:
        answered = threading.Event()
        monkeypatch.setattr(server, "close_request", lambda request: (request.close(), answered.set()))
        with socket.create_connection(("127.0.0.1", server.server_port)) as player:
            player.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing is a reset
            player.sendall(b"POST /step HTTP/1.1\r\nContent-Length: 2\r\n\r\n" + text)
            time.sleep(0.2)
        assert answered.wait(60)
        return capsys.readouterr().err

    assert asked(b"{") == ""
    monkeypatch.setattr(server.game, "step", lambda **_: 1 / 0)
    assert "ZeroDivisionError" in asked(b"{}")


def test_a_server_that_is_started_again_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with GameServer() as first:
        port = first.server_port
    started = []

    async def start(seconds: float) -> None:
        if not started:
            started.append(GameServer(port))
            threading.Thread(target=started[0].serve_forever, args=(0.01,), daemon=True).start()

    monkeypatch.setattr(loop.asyncio, "sleep", start)
    assert played(f"http://127.0.0.1:{port}", halving)[0].reward_score == 1
    started[0].shutdown()
    started[0].server_close()


def test_the_lessons_player_finds_three_of_five() -> None:
    found = 0
    for number in range(500):
        game, last = Game(), rows.lessons(number)[-1]
        game.reset("a", number)
        found += game.step("a", last["answer"])["text"] == "right"
    assert 275 < found < 325
