#!/bin/sh
# Compiler launcher of the CUDA plug-in: runs the compilation and fails it when a kernel spills more
# than LIMIT bytes of registers to local memory, which costs more than anything else in these kernels.
#   check_spills.sh LIMIT COMPILER [ARGUMENT …]      (with -Xptxas=--warn-on-spills)
limit=$1
shift
errors=$(mktemp) || exit 1
"$@" 2>"$errors"
code=$?
# "ptxas warning : Registers are spilled to local memory in function 'f', 8 bytes spill stores, 4 bytes spill loads"
awk -v limit="$limit" '
  /Registers are spilled to local memory/ {
    bytes = 0
    for (i = 2; i <= NF; i++) if ($i ~ /^bytes/ && $(i + 1) == "spill") bytes += $(i - 1)
    if (bytes <= limit) next
    print "error: more than " limit " bytes of spills: " $0
    bad = 1
    next
  }
  { print }
  END { exit bad ? 9 : 0 }' "$errors" >&2
spills=$?
rm -f "$errors"
[ $code -ne 0 ] && exit $code
[ $spills -eq 0 ] || exit 1
