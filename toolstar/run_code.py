"""
Run programs on another machine, by SandboxFusion's POST /run_code [1]: client and server.

    (1) Remote   a client with the methods of a Jail; works with this server and SandboxFusion's
    (2) serve    a server that runs the programs in this machine's jail

Reads and writes no files.

    python -m toolstar.jail serve --port 8080         # on the machine that runs the programs
    "python": "http://that-machine:8080/run_code"     # in tools.json on the other one

[1] SandboxFusion, arXiv:2412.00535
"""
import contextlib
import sys
import time

from runtime import read_bounded
from toolstar.jail import Result, read_error


class Remote:
    """Runs programs on a SandboxFusion server, with the methods of a Jail.

    url: the server's address. seconds: the default time limit of a program. Unlike a Jail, it does
    not show the value of a last bare expression. After an answer it waits up to `patience` seconds
    for a server that runs no program, so that a restart breaks no call.
    """
    level, patience = "remote", 300.0

    def __init__(self, url, seconds=5.0):
        import httpx2
        self.url = url.rstrip("/").removesuffix("/run_code") + "/run_code"
        self.seconds, hooks = seconds, {"response": [read_bounded]}
        self.client = httpx2.Client(trust_env=False, event_hooks=hooks)
        self.failures = httpx2.HTTPError, ValueError, KeyError, TypeError, RecursionError
        self.worked = False  # whether the server has answered and was not given up since

    def run(self, program, stdin="", seconds=None):
        """Run a program -> Result, as Jail.run does. If the server fails on it twice: "killed" if
        it runs another program, else "broken"."""
        seconds, until = self.seconds if seconds is None else seconds, time.monotonic()
        until += self.patience * self.worked
        up = False
        while True:
            for _ in "first", "again":
                try:
                    return self.ask(program, stdin, seconds)
                except self.failures as error:
                    why = f"{self.url}: {error!r}"
            with contextlib.suppress(*self.failures):
                self.ask("print(1)", "", seconds)
                if up:
                    return Result("killed", "", "", "the server fails on it", 0.0)
                up = True  # it may have come back just now: try once more
                continue
            if time.monotonic() >= until:
                self.worked = False
                return Result("broken", "", "", why, 0.0)
            time.sleep(min(2, self.patience / 10))

    def ask(self, program, stdin, seconds):
        """Send one request -> its Result. Raises one of self.failures if there is none."""
        # servers refuse half a surrogate pair, which JSON can hold
        code, stdin = (text.encode("utf-8", "replace").decode() for text in (program, stdin))
        body = {"code": code, "language": "python", "stdin": stdin, "run_timeout": seconds}
        reply = self.client.post(self.url, json=body, timeout=seconds + 30)
        result, self.worked = read_reply(reply.json(), seconds), True
        return result

    def close(self):
        self.client.close()


def read_reply(reply, seconds):
    """The Result in a server's JSON; ValueError, KeyError or TypeError if there is none."""
    if reply["status"] == "SandboxError":
        raise ValueError(reply.get("message") or "SandboxError")
    done = reply["run_result"]
    out, err = "" + (done["stdout"] or ""), "" + (done["stderr"] or "")
    status, error = "ok", ""
    if done["status"] == "TimeLimitExceeded":
        status, error = "timeout", f"stopped after {seconds:g} s"
    elif reply["status"] != "Success":
        status, error = read_error(done.get("return_code"), err)
    return Result(status, out, err, error, float(done.get("execution_time") or 0))


def write_reply(result):
    """A Result as SandboxFusion's JSON."""
    if result.status == "broken":
        return {"status": "SandboxError", "message": result.error}
    good, late = result.status == "ok", result.status == "timeout"
    # a killed program has no traceback: send our own words instead
    told = result.error if result.status in ("killed", "output") else result.stderr
    return {"status": "Success" if good else "Failed", "message": "", "run_result": {
        "status": "TimeLimitExceeded" if late else "Finished", "execution_time": result.seconds,
        "return_code": None if late else int(not good), "stdout": result.stdout, "stderr": told}}


def serve(jail, host, port):
    """Answer POST /run_code until interrupted. jail: an open Jail."""
    import fastapi
    import pydantic
    import uvicorn

    class Request(pydantic.BaseModel):
        code: str
        language: str = "python"
        stdin: str | None = ""
        run_timeout: float = jail.seconds
        files: dict = {}

    app = fastapi.FastAPI()

    @app.post("/run_code")
    def run_code(asked: Request):
        if asked.language != "python" or asked.files:
            return {"status": "SandboxError", "message": "only Python runs here, without files"}
        seconds = min(asked.run_timeout, jail.seconds)
        return write_reply(jail.run(asked.code, asked.stdin or "", seconds))

    print(f"jail.py: {jail.level}, http://{host}:{port}/run_code", file=sys.stderr)
    uvicorn.run(app, host=host, port=port, log_level="warning")
