/* What compiled code looks at of one buffer: a tensor, through its type's exchange table, or an address as int. */

#include "native.h"

enum { FLOATS = 2 }; /* kDLFloat */

/* What torch says of a tensor; 1 as well where it says nothing. */
static int is_negated(PyObject *value) {
    PyObject *said = PyObject_CallMethodObjArgs(value, negated_name, NULL);
    int negated = said != Py_False;
    if (!said) PyErr_Clear();
    Py_XDECREF(said);
    return negated;
}

static uint32_t dtype_of(const View *v) { return (uint32_t)v->code << 24 | (uint32_t)v->bits << 16 | v->lanes; }

uint64_t address_of(const Facts *facts, PyObject *value, uint64_t mask) {
    uint64_t at;
    if (!value || Py_TYPE(value) != facts->type) return 0;
    if (facts->exchange) {
        View v;
        if (facts->exchange->view(value, &v)) {
            PyErr_Clear();
            return 0;
        }
        size_t bytes = sizeof(int64_t) * (size_t)facts->ndim;
        if (v.ndim != facts->ndim || v.device_type != facts->device_type || v.device_id != facts->device_id || dtype_of(&v) != facts->dtype) return 0;
        if (bytes && (!v.strides || memcmp(v.shape, facts->dims, bytes) || memcmp(v.strides, facts->dims + facts->ndim, bytes))) return 0;
        if (facts->maybe_negated && is_negated(value)) return 0;
        at = (uint64_t)(uintptr_t)v.data + v.byte_offset;
    } else {
        at = PyLong_AsUnsignedLongLong(value);
        if (at == (uint64_t)-1 && PyErr_Occurred()) PyErr_Clear(), at = 0;
    }
    return at & mask ? 0 : at;
}

int learn_facts(Facts *facts, PyObject *value) {
    PyTypeObject *type = Py_TYPE(value);
    if (type != &PyLong_Type) {
        View v;
        PyObject *capsule = PyObject_GetAttrString((PyObject *)type, "__dlpack_c_exchange_api__");
        const Exchange *table = capsule ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api") : NULL;
        Py_XDECREF(capsule);
        if (!table || table->major != 1 || !table->view || table->view(value, &v)) {
            PyErr_Clear();
            return 0;
        }
        if (v.ndim < 0 || v.ndim > MAX_RANK || (v.ndim && !v.strides)) return 0;
        facts->maybe_negated = v.code == FLOATS; /* unless neighbours lie side by side: then they are no parts of complex numbers */
        for (int i = 0; i < v.ndim; i++) {
            facts->dims[i] = v.shape[i], facts->dims[v.ndim + i] = v.strides[i];
            if (v.shape[i] > 1 && v.strides[i] == 1) facts->maybe_negated = 0;
        }
        facts->exchange = table, facts->ndim = v.ndim, facts->device_type = v.device_type, facts->device_id = v.device_id;
        facts->dtype = dtype_of(&v);
    }
    facts->type = (PyTypeObject *)Py_NewRef((PyObject *)type);
    return 1;
}
