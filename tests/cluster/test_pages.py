"""What pages say of a cluster is done on one; see tests/pages.py."""

import json

import pytest
from pages import PAGES, Reader, blocks, name


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(block["note"] == "needs" for block in blocks(page))],
    ids=name,
)
def test_what_a_page_shows_is_what_happens(page, cluster, namespace, config, tmp_path):
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(json.dumps(config))
    there = {"registry.example/team/hello:1": cluster.base_image, "vision/": f"{namespace}/"}
    env = cluster.env | {"KUBECONFIG": str(kubeconfig)}
    Reader(tmp_path / "reader", env, there).follow(page, needs=True)
