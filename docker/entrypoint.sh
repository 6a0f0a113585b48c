#!/bin/sh
# `docker run IMAGE build ...` is `glass build ...`; a shell, Python and its launcher are what they are.
case "$1" in
    sh | bash | python | python3 | torchrun) exec "$@" ;;
    glass) shift ;;
esac
exec glass "$@"
