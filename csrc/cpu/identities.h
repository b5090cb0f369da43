// Whether Python objects are still the ones that were looked at.
#pragma once

#include <Python.h>

namespace fastbert {

// For fastbert/watch.py alone: of (objects, types, tables, values), four tuples, whether each
// object is of its very type, and the dicts `tables` hold these very objects as values, one dict's
// after the other's.
PyObject* same_identities(PyObject*, PyObject* args);

}  // namespace fastbert
