"""What a report shows of the environment, and what it never does."""

from src.doctor.environment import HIDDEN, redacted, shown


def test_values_are_shown_of_an_allow_list_only() -> None:
    found = shown(
        {
            "OMP_NUM_THREADS": "4",
            "WANDB_API_KEY": "0123456789",
            "https_proxy": "http://me:pass@proxy",
            "MASTER_ADDR": "10.1.2.3",
            "NCCL_TOPO_FILE": "/home/me/topology.xml",
            "AWS_SECRET_ACCESS_KEY": "abc",
            "PATH": "/usr/bin",
        }
    )
    assert found == {
        "MASTER_ADDR": HIDDEN,
        "NCCL_TOPO_FILE": HIDDEN,
        "OMP_NUM_THREADS": "4",
        "WANDB_API_KEY": HIDDEN,
        "https_proxy": HIDDEN,
    }


def test_a_secret_that_got_into_the_text_is_struck_out() -> None:
    environ = {"HF_TOKEN": "hf_abcdefgh", "https_proxy": "http://kim:hunter2hunter2@proxy:80", "MY_SECRET": "none"}
    text = "hf_abcdefgh, hunter2hunter2, see https://user:word@host/x; none"
    assert redacted(text, environ, "", "") == "***, ***, see https://***@host/x; none"


def test_a_home_and_its_owners_name_are_struck_out_of_paths() -> None:
    text = "/home/kim/run, /home/kimberly/run, /scratch/kim/data and kim"
    assert redacted(text, {}, "/home/kim", "kim") == "~/run, /home/kimberly/run, /scratch/<user>/data and kim"


def test_a_home_at_the_root_strikes_out_nothing() -> None:
    assert redacted("/a/b", {}, "/", "") == "/a/b"
