#include "cpu/identities.h"

namespace fastbert {
namespace {

bool have_types(PyObject* objects, PyObject* types) {
  const Py_ssize_t count = PyTuple_GET_SIZE(objects);
  if (count != PyTuple_GET_SIZE(types)) return false;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(PyTuple_GET_ITEM(objects, i)));
    if (type != PyTuple_GET_ITEM(types, i)) return false;
  }
  return true;
}

bool hold_values(PyObject* tables, PyObject* values) {
  const Py_ssize_t count = PyTuple_GET_SIZE(values);
  Py_ssize_t seen = 0;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tables); ++i) {
    PyObject *table = PyTuple_GET_ITEM(tables, i), *value = nullptr;
    Py_ssize_t place = 0;
    while (PyDict_Next(table, &place, nullptr, &value)) {
      if (seen == count || value != PyTuple_GET_ITEM(values, seen++)) return false;
    }
  }
  return seen == count;
}

}  // namespace

PyObject* same_identities(PyObject*, PyObject* args) {
  PyObject *objects, *types, *tables, *values;
  if (!PyArg_ParseTuple(args, "O!O!O!O!", &PyTuple_Type, &objects, &PyTuple_Type, &types,
                        &PyTuple_Type, &tables, &PyTuple_Type, &values)) {
    return nullptr;
  }
  return PyBool_FromLong(have_types(objects, types) && hold_values(tables, values));
}

}  // namespace fastbert
