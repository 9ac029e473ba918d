"""A headless Chromium, driven over its DevTools protocol."""

import contextlib
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from base64 import b64decode
from pathlib import Path

import pytest


def chromium():
    """The program, or skip the test."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    return found


class Browser:
    """One page of a browser of its own. ``log`` has what its console said and which scripts raised."""

    def __init__(self):
        from websockets.sync.client import connect

        self.folder = tempfile.mkdtemp(prefix="chromium-")
        flags = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --disable-extensions"
        flags += " --disable-background-networking --remote-debugging-port=0 --window-size=1280,860 --hide-scrollbars"
        flags += " --disable-features=Translate,OptimizationHints,MediaRouter --disable-component-update --mute-audio"
        self.process = subprocess.Popen(
            [chromium(), *flags.split(), f"--user-data-dir={self.folder}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        port_file = Path(self.folder) / "DevToolsActivePort"
        self.until(lambda: port_file.exists() and len(port_file.read_text().splitlines()) == 2, 30)
        port, path = port_file.read_text().splitlines()
        self.stack = contextlib.ExitStack()
        self.socket = self.stack.enter_context(connect(f"ws://127.0.0.1:{port}{path}", max_size=None))
        self.numbers, self.session, self.log = itertools.count(1), None, []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method, **params):
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": params}
        self.socket.send(json.dumps(message | ({"sessionId": self.session} if self.session else {})))
        while True:
            answer = json.loads(self.socket.recv(timeout=30))
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded", "Page.javascriptDialogOpening"):
                self.log.append(answer)

    def open(self, url):
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=url)

    def js(self, expression):
        """The value of an expression in the page."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, expression, seconds=20):
        """Wait until an expression is true, and return its value."""
        found = f"const found = {expression}; return found instanceof Node ? true : found"
        return self.until(lambda: self.js(f"(() => {{ try {{ {found} }} catch (e) {{ return null }} }})()"), seconds)

    def until(self, found, seconds):
        end = time.monotonic() + seconds
        while not (value := found()):
            assert time.monotonic() < end, f"not within {seconds} s"
            time.sleep(0.03)
        return value

    def text(self, selector="main"):
        return self.js(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")

    def errors(self):
        return [
            one for one in self.log if one["method"] != "Log.entryAdded" or one["params"]["entry"]["level"] == "error"
        ]

    def screenshot(self, path):
        Path(path).write_bytes(b64decode(self.send("Page.captureScreenshot", format="png")["data"]))

    def close(self):
        self.stack.close()
        self.process.terminate()
        self.process.wait(20)
        shutil.rmtree(self.folder, ignore_errors=True)
