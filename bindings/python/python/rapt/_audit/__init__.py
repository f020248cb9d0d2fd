"""The auditor: checks any attention for boundary bugs (`rapt.audit`) and names them from an output (`rapt.diagnose`).

```text
checks      the parent: order, budget, findings          supervisor, worker   the child process that holds the callee
hazards     the table of hazards and their probes        judges, evidence     verdicts with numbers; gradients: those of a backward and of dropout
case        one probe; tensors: how it lies in memory    rapt._reference      the formula in f64 and the tolerance rule
script      a case as a program of 15 lines; gradient_script; shrink      diagnose, sight, hypotheses   which corruption an output shows
report      table, JSON, JUnit; page: HTML               cli                  the command `rapt audit`
```
Deliberately absent: the native module (the reference is numpy's), torch unless the callee or the caller brings it.
"""
