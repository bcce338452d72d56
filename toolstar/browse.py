"""
The browser of the tools world: fetch a URL that a language model wrote and return text.

    (1) check_url  accept http and https URLs with a host and no user name; also for redirects
    (2) Gate       open every connection: resolve the host once, refuse it if any of its addresses
                   is not public, and connect to one of these addresses, so that a name server
                   cannot give another one afterwards; one deadline covers all waiting
    (3) fetch      send the request, follow redirects, and limit the size of the body
    (4) extract    read HTML, text and (if pypdf is installed) PDF by a fixed program in the jail
    (5) passages   choose the paragraphs that match the query best, by BM25

This file decides what a model can reach. httpcore2, the layer below httpx2, uses no proxies, no
cookies and no environment variables. Scripts are not run, <meta refresh> is not followed. The
caller must escape the text, which comes from strangers.

Reads   the network, within the rules above     Writes  nothing

    jail = toolstar.jail.Jail(preload=("trafilatura",))
    browser = toolstar.browse.Browser(jail, allow=["127.0.0.1:8123"])
    browser.read("http://127.0.0.1:8123/lakes.html", "how deep is Lake Mol?")
"""
import base64
import ipaddress
import json
import math
import re
import socket
import textwrap
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

HEADERS = {"User-Agent": "Mozilla/5.0 (compatible; STAR)", "Accept": "text/html,text/plain,*/*",
           "Accept-Encoding": "identity", "Connection": "close"}
HOST = re.compile(r"[0-9a-z_][0-9a-z_.-]*|[0-9a-f:.]+")  # a name, or the inside of [IPv6]
PORTS = (80, 443)
REDIRECTS = (301, 302, 303, 307, 308)
PAGES = ("text/html", "application/xhtml+xml", "application/pdf")
PLAIN = re.compile(r"text/.*|application/(json|xml)|application/.*\+(json|xml)")
LOOKUPS = 64  # host names looked up at a time, each in a thread

# IANA's special-purpose registries are written out because Python's ipaddress changes between
# versions. 168.63.129.16 looks public, but is a service inside of Azure's networks.
FORBIDDEN = [ipaddress.ip_network(network) for network in (
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12",
    "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15",
    "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4", "168.63.129.16/32",
    # the first two, Teredo and 6to4, embed IPv4 addresses
    "2001::/23", "2002::/16", "2001:db8::/32", "3fff::/20")]
# all other IPv6 is loopback, IPv4-compatible, link-local, unique local, multicast or unassigned
UNICAST = ipaddress.ip_network("2000::/3")
NAT64 = ipaddress.ip_network("64:ff9b::/96")  # the last 32 bits are an IPv4 address


class PageError(ValueError):
    """What is wrong with a page, a URL or a host, in one line that the model may read."""


class BrowserBroken(RuntimeError):
    """The jail that reads pages is broken; the page is not at fault."""


def page_error(url, words):
    """A PageError of one line. Both texts are cut: a URL may come from a server, and be long."""
    line = "".join(c if c.isprintable() else " " for c in f"{url[:200]} {words[:200]}")
    return PageError(" ".join(line.split()))


# ---------------------------------------------------------------- what may be reached

def check_url(url, base=None):
    """The httpx2.URL of a URL that a model wrote, or of a redirect from `base`; else PageError."""
    import httpx2
    try:
        found = base.join(url) if base else httpx2.URL(url.strip())
    except (httpx2.InvalidURL, ValueError):  # ValueError: half a surrogate pair
        raise page_error(url, "is not a URL: write it as http://host/path") from None
    if found.scheme not in ("http", "https") or not HOST.fullmatch(found.raw_host.decode("ascii")):
        raise page_error(url, "is not a web page: write it as http://host/path")
    if found.userinfo:
        raise page_error(url, "holds a user name: leave out what stands before the @")
    return found


def is_public(text):
    """Whether a text is a numeric address on the public internet."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    if getattr(address, "ipv4_mapped", None) or address in NAT64:
        address = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    inside = address.version == 6 and address not in UNICAST
    zoned = "%" in text  # with a zone, any address is link-local
    return not inside and not zoned and not any(address in network for network in FORBIDDEN)


class Gate:
    """The network backend of httpcore2 that opens all connections of one read()."""

    def __init__(self, browser, url):
        self.browser, self.url = browser, url
        self.end = time.monotonic() + browser.seconds

    def left(self):
        """The seconds until the deadline; PageError if it has passed."""
        left = self.end - time.monotonic()
        if left <= 0:
            raise page_error(self.url, f"took longer than {self.browser.seconds:g} seconds")
        return left

    def addresses(self, host, port):
        """The numeric addresses of a host; PageError if it does not exist or is not public."""
        pair = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        allowed = pair in self.browser.allow
        if not allowed and port not in PORTS:
            raise page_error(self.url, f"is on port {port}: only 80 and 443 can be read")
        left, lookups = self.left(), self.browser.lookups
        asked = lookups.submit(self.browser.resolve, host, port, type=socket.SOCK_STREAM)
        try:
            found = list(dict.fromkeys(entry[4][0] for entry in asked.result(left)))
        except TimeoutError:
            asked.cancel()
            raise page_error(self.url, f"has a host that is not found in time: {host}") from None
        except (OSError, ValueError):  # ValueError: not a possible host name
            raise page_error(self.url, f"has a host that does not exist: {host}") from None
        # One forbidden address is enough to refuse the host, whose owner decides on their order.
        # The message names no address, so that a model learns nothing of the network here.
        if not allowed and not all(map(is_public, found)):
            raise page_error(self.url, f"has a host that is not on the public internet: {host}")
        return found

    def connect_tcp(self, host, port, timeout=None, local_address=None, socket_options=None):
        """A Wire to the first address that answers. httpcore2 calls this for every connection."""
        import httpcore2
        addresses = self.addresses(host, port)
        for tried, address in enumerate(addresses):
            share = self.left() / (len(addresses) - tried)
            try:
                return Wire(httpcore2.SyncBackend().connect_tcp(address, port, share), self)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout):
                continue
        raise page_error(self.url, f"has a host that does not answer: {host}")


class Wire:
    """A stream of httpcore2 that waits no longer than until its gate's deadline."""

    def __init__(self, stream, gate):
        self.stream, self.gate = stream, gate
        self.close, self.get_extra_info = stream.close, stream.get_extra_info

    def read(self, max_bytes, timeout=None):
        return self.stream.read(max_bytes, self.gate.left())

    def write(self, buffer, timeout=None):
        self.stream.write(buffer, self.gate.left())

    def start_tls(self, ssl_context, server_hostname=None, timeout=None):
        left = self.gate.left()
        return Wire(self.stream.start_tls(ssl_context, server_hostname, left), self.gate)


# ---------------------------------------------------------------- pages

# Runs in the jail. It tries UTF-8 before the encoding that the page names, because many pages name
# a wrong one and text in other encodings is rarely valid UTF-8. A jail keeps 64 KiB of output, in
# which 48,000 bytes fit with all their JSON escapes.
READER = r"""
import base64, io, json, re, sys, trafilatura
from trafilatura.utils import decode_file
page = json.load(sys.stdin)
data = base64.b64decode(page["data"])
title, text, fault = "", "", ""

def decode():
    said = re.search(rb"charset=[\"']?([\w-]+)", data[:1024])
    for name in ("utf-8", page["charset"], said[1].decode().lower() if said else ""):
        try:  # like all browsers, read "Latin-1" as Windows' variant of it
            return data.decode({"iso-8859-1": "cp1252"}.get(name, name))
        except (LookupError, ValueError):
            pass
    return decode_file(data)

def clean(text):
    text = re.sub(r"[^\S\n]+", " ", text)
    return "".join(c for c in text if c == "\n" or c.isprintable()).strip()

if data.startswith(b"%PDF-"):
    try:
        import pypdf
        for sheet in pypdf.PdfReader(io.BytesIO(data)).pages:
            text += sheet.extract_text() + "\n"
            if len(text) > page["text"]:
                break
    except ImportError:
        fault = "is a PDF, which cannot be read here"
else:
    text = decode()
    if 10 * len(re.findall(r"[\x00-\x08\x0e-\x1f\ufffd]", text)) > len(text):
        fault = "is no text: binary data"
    elif page["html"]:
        text = text if "<html" in text.lower() else f"<html><body>{text}</body></html>"
        tree = trafilatura.load_html(text)
        title = "" if tree is None else tree.findtext(".//title") or ""
        # fast=True: the other methods would load word lists for 0.2 s in every fork
        found = trafilatura.extract(tree, fast=True, favor_recall=True, include_comments=False)
        text = found or trafilatura.html2txt(text)
title = " ".join(clean(title).split())[:200]
text = clean(text)[:page["text"]].encode()[:48_000].decode(errors="ignore")
print(json.dumps([title, text, fault], ensure_ascii=False))
"""


def choose_passages(text, query, limit):
    """The paragraphs that match a query best, in page order, at most `limit` characters in all.

    Scores paragraphs by BM25 (k1 1.2, b 0.75); long ones are cut at a quarter of the limit. The
    earlier of two equal paragraphs wins, so without a match the page's start is returned.
    """
    parts = [part for line in text.splitlines()
             for part in textwrap.wrap(line, max(limit // 4 - 3, 1), break_on_hyphens=False)]
    bags = [Counter(re.findall(r"\w+", part.lower())) for part in parts]
    wanted = set(re.findall(r"\w+", query.lower()))
    holding = Counter(word for bag in bags for word in wanted & bag.keys())
    rarity = {word: math.log(1 + (len(bags) - n + 0.5) / (n + 0.5)) for word, n in holding.items()}
    mean = sum(bag.total() for bag in bags) / max(len(bags), 1) or 1
    scores = [math.fsum(rarity[word] * bag[word] * 2.2 /
                        (bag[word] + 1.2 * (0.25 + 0.75 * bag.total() / mean))
                        for word in wanted & bag.keys()) for bag in bags]
    # half of a paragraph's score also goes to the next one: the text below a matching heading
    scores = [score + before / 2 for score, before in zip(scores, [0.0, *scores], strict=False)]
    chosen = set()
    for i in sorted(range(len(parts)), key=lambda i: -scores[i]):
        limit -= len(parts[i]) + 3  # for the line break and perhaps the mark of a gap
        if limit < 0:
            break
        chosen.add(i)
    return "\n".join(parts[i] if i - 1 in chosen or not i else "…\n" + parts[i]
                     for i in sorted(chosen))


class Browser:
    """Reads pages for a language model, from any number of threads.

    jail       a Jail whose workers have trafilatura; the caller closes it
    allow      "host:port" pairs that are exempt from the rules on ports and addresses, for your own
               pages; any page may redirect to them
    seconds    time limit of a read: lookups, connections, redirects, body and extraction together,
               without the wait for a worker of the jail
    max_bytes  the largest body; a read needs about five times as much memory
    text       characters that are kept of a page
    passages   characters that read() returns by default
    resolve    a function like socket.getaddrinfo
    """

    def __init__(self, jail, allow=(), seconds=10.0, max_bytes=5_000_000, redirects=5, text=20_000,
                 passages=2_000, resolve=socket.getaddrinfo):
        import httpx2
        self.jail, self.allow = jail, frozenset(pair.lower() for pair in allow)
        self.seconds, self.max_bytes, self.redirects = seconds, max_bytes, redirects
        self.text, self.passages, self.resolve = text, passages, resolve
        self.lookups = ThreadPoolExecutor(LOOKUPS, "lookup")
        self.tls = httpx2.create_ssl_context(trust_env=False)

    def close(self):
        self.lookups.shutdown(wait=False, cancel_futures=True)

    def read(self, url, query="", passages=None):
        """The title and the passages of a page. Raises PageError if the page is at fault,
        BrowserBroken if the jail is."""
        gate = Gate(self, url)
        title, text = self.extract(self.fetch(gate), gate)
        return f"{title}\n\n{choose_passages(text, query, passages or self.passages)}".strip()

    def fetch(self, gate):
        """The page at the gate's URL or where that redirects to, as READER takes it."""
        import httpcore2
        faults = httpcore2.TimeoutException, httpcore2.NetworkError, httpcore2.ProtocolError
        where = check_url(gate.url)
        for _ in range(self.redirects + 1):
            try:
                location, page = self.request(where, gate)
            except faults as error:
                gate.left()  # raises if the deadline is the cause
                raise page_error(gate.url, f"cannot be read: {error}") from None
            if page:
                return page
            where = check_url(location, where)
        raise page_error(gate.url, f"redirects more than {self.redirects} times")

    def request(self, where, gate):
        """One GET -> (target of a redirect, None) or (None, page)."""
        import httpcore2
        url = httpcore2.URL(scheme=where.raw_scheme, host=where.raw_host, port=where.port,
                            target=where.raw_path)
        line = httpcore2.HTTPConnection(url.origin, ssl_context=self.tls, network_backend=gate)
        with line, line.stream("GET", url, headers={"Host": where.netloc, **HEADERS}) as response:
            headers = {name.decode("latin-1").lower(): value.decode("latin-1")
                       for name, value in response.headers}
            if response.status in REDIRECTS and "location" in headers:
                return headers["location"], None
            if not 200 <= response.status < 300:
                raise page_error(gate.url, f"is not there: status {response.status}")
            kind, _, rest = headers.get("content-type", "text/html").lower().partition(";")
            kind, charset = kind.strip(), re.search(r"charset=[\"']?([\w.:-]+)", rest)
            if kind not in PAGES and not PLAIN.fullmatch(kind):
                raise page_error(gate.url, f"is no text: {kind}")
            packed = headers.get("content-encoding", "").strip().lower()
            if packed not in ("", "identity"):  # it may be a decompression bomb
                raise page_error(gate.url, "comes compressed, although that was not asked for")
            data = bytearray()
            for chunk in response.iter_stream():
                data += chunk
                gate.left()
                if len(data) > self.max_bytes:
                    raise page_error(gate.url, f"is larger than {self.max_bytes:,} bytes")
        return None, {"data": base64.b64encode(data).decode(), "html": kind in PAGES,
                      "charset": charset[1] if charset else "", "text": self.text}

    def extract(self, page, gate):
        """The (title, text) of a page, read in the jail."""
        done = self.jail.run(READER, stdin=json.dumps(page), seconds=gate.left())
        if done.status == "broken" or done.error.startswith(("ImportError", "ModuleNotFoundError")):
            raise BrowserBroken(f"the jail cannot read pages: {done.error}")
        if done.status != "ok":
            raise page_error(gate.url, f"cannot be read ({done.status})")
        try:
            title, text, fault = map(str, json.loads(done.stdout))
        except (TypeError, ValueError, RecursionError):  # the page has taken over the reader
            raise page_error(gate.url, "cannot be read") from None
        if fault or not text:
            raise page_error(gate.url, fault or "holds no text")
        return title, text
