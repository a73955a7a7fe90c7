/* The module: connection to the driver, types. */

#include "native.h"

#include <pthread.h>

Driver driver;
int forked;
PyObject *stream_name, *negated_name;

static void in_child(void) { forked |= driver.launch != NULL; } /* else the child may start CUDA itself */

/* connect(...): addresses of the driver's functions, in the order of the structure. */
static PyObject *connect(PyObject *module, PyObject *args) {
    unsigned long long launch, set, current, push, pop, move;
    (void)module;
    if (!PyArg_ParseTuple(args, "KKKKKK", &launch, &set, &current, &push, &pop, &move)) return NULL;
    *(void **)&driver.launch = ADDRESS(launch);
    *(void **)&driver.set = ADDRESS(set);
    *(void **)&driver.current = ADDRESS(current);
    *(void **)&driver.push = ADDRESS(push);
    *(void **)&driver.pop = ADDRESS(pop);
    *(void **)&driver.move = ADDRESS(move);
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"connect", connect, METH_VARARGS, "connect(launch, memset, get_current, push, pop, replace_address): addresses of the driver's functions."},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "graphdnn._native", "See graphdnn/native/native.h.", -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) {
    PyObject *module = PyModule_Create(&definition);
    PyObject *launches = PyType_FromSpec(&launches_spec), *call = PyType_FromSpec(&call_spec);
    stream_name = PyUnicode_InternFromString("stream"), negated_name = PyUnicode_InternFromString("is_neg");
    if (!module || !launches || !call || !stream_name || !negated_name || PyModule_AddObjectRef(module, "Launches", launches)
        || PyModule_AddObjectRef(module, "Call", call)) {
        Py_XDECREF(module);
        module = NULL;
    } else {
        pthread_atfork(NULL, NULL, in_child);
    }
    Py_XDECREF(launches);
    Py_XDECREF(call);
    return module;
}
