"""Check the files of the static site. Sphinx writes the documentation beside them."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="module")
def page_site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("page_site", DOCS / "page_site.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_front_page_leads_to_pages_that_exist(page_site: ModuleType, tmp_path: Path) -> None:
    page_site.write_front(tmp_path)
    page_site.write_site(tmp_path / page_site.STORY)
    front = (tmp_path / "index.html").read_text(encoding="utf-8")
    links = re.findall(r'(?:href|src|from|content)[= ]"(?:\./)?(docs/[^"]*)"', front)
    assert {"docs/story/story.html", "docs/story/preview.jpg", "docs/index.html"} <= {*links}
    for link in links:
        written = tmp_path / (f"{link}index.html" if link.endswith("/") else link)
        source = DOCS / Path(link).relative_to("docs").with_suffix(".md")
        assert written.exists() or source.exists(), link


def test_shared_links_have_a_title_a_description_and_a_picture(
    page_site: ModuleType, tmp_path: Path
) -> None:
    address = "https://example.org/mie/"
    page_site.write_site(tmp_path, f"{address}{page_site.STORY}")
    page_site.write_front(tmp_path / "front", address)
    for name in (*page_site.PAGES, "front/index.html"):
        page = (tmp_path / name).read_text(encoding="utf-8")
        assert re.search(r"<title>.{10,70}</title>", page)
        assert re.search(r'<meta name="description" content=".{50,160}">', page)
        assert f'<meta property="og:image" content="{address}docs/story/preview.jpg">' in page


def test_the_pages_lead_to_the_documentation_only_where_there_is_some(
    page_site: ModuleType, tmp_path: Path
) -> None:
    page_site.write_site(tmp_path / "alone")
    page_site.write_site(tmp_path / "beside", documentation="../index.html")
    for name in page_site.PAGES:
        link = '<a class="button" href="../index.html">Documentation</a>'
        assert link not in (tmp_path / "alone" / name).read_text(encoding="utf-8")
        assert link in (tmp_path / "beside" / name).read_text(encoding="utf-8")
