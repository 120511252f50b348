"""docs/guide/more-tasks.md, "A judge model": its reward asks a server, and a server that fails gives no score."""

import asyncio
import re
from pathlib import Path

import pytest
from aiohttp import web

from tests.kit import ROOT
from verl_vcpo.user_code.errors import UserCodeError
from verl_vcpo.user_code.killable import Pool
from verl_vcpo.user_code.reward_function import RewardFunction, score_of

PAGE = (ROOT / "docs/guide/more-tasks.md").read_text()


async def answer(request: web.Request) -> web.Response:
    asked = await request.json()
    (question,) = asked["messages"]
    if "fails" in question["content"]:
        raise web.HTTPServiceUnavailable
    said = " Yes." if "Right answer: 4\nAnswer: four" in question["content"] and asked["model"] == "JUDGE" else "No"
    return web.json_response({"choices": [{"message": {"content": said}}]})


def test_a_judge(tmp_path: Path) -> None:
    (code,) = re.findall(r"cat > judge.py <<'PYTHON'\n(.*?)^PYTHON$", PAGE, re.DOTALL | re.MULTILINE)
    (tmp_path / "judge.py").write_text(code)

    async def main() -> list[float]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", answer)
        await (runner := web.AppRunner(app)).setup()
        await (site := web.TCPSite(runner, "127.0.0.1", 0)).start()
        url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]
        pool = Pool(RewardFunction(f"{tmp_path}/judge.py", "compute_score", {"url": url, "model": "JUDGE"}, 30.0))
        try:
            row = {"data_source": "mine", "ground_truth": "4", "extra_info": {}}
            scores = [score_of(await pool.call({"solution_str": text, **row})) for text in ("four", "five")]
            with pytest.raises(UserCodeError, match="raises ClientResponseError: 503"):
                await pool.call({"solution_str": "fails", **row})
            return scores
        finally:
            pool.close()
            await runner.cleanup()

    assert asyncio.run(main()) == [1.0, 0.0]
