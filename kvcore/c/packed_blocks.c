// kvcore.packed_blocks: tokens packed, and the chain of their blocks hashed, in a loop of C.
//
// What kvcore/hashing.py does where this module was not compiled, with the same results: packed_blocks.pyi says what.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#if PY_VERSION_HEX < 0x030B0000
#include <longintrepr.h>
#endif

#include "xxh3.h"

#define HASH_LENGTH 16

// The value of an int of one digit that is not negative, as every token of a model is; else -1. Reading any int, by a
// call, takes twice as long.
static inline int64_t small_value(PyObject *number)
{
    if (!PyLong_CheckExact(number)) return -1;
#if PY_VERSION_HEX >= 0x030C0000
    if (!PyUnstable_Long_IsCompact((PyLongObject *)number)) return -1;
    return PyUnstable_Long_CompactValue((PyLongObject *)number);
#else
    if (Py_SIZE(number) == 0) return 0;
    return Py_SIZE(number) == 1 ? (int64_t)((PyLongObject *)number)->ob_digit[0] : -1;
#endif
}

static PyObject *pack_into(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer packed;
    PyObject *tokens;
    if (!PyArg_ParseTuple(args, "w*O!", &packed, &PyList_Type, &tokens)) return NULL;
    const Py_ssize_t count = PyList_GET_SIZE(tokens);
    Py_ssize_t done = 0;
    const int fits = packed.len % 4 == 0 && packed.len / 4 == count;
    for (; fits && done < count; done++) {
        const int64_t value = small_value(PyList_GET_ITEM(tokens, done));
        if (value < 0) break;
        const uint32_t token = (uint32_t)value;
        memcpy((char *)packed.buf + done * 4, &token, sizeof token);
    }
    PyBuffer_Release(&packed);
    return PyBool_FromLong(fits && done == count);
}

static void write_digest(uint8_t *to, struct hash128 hash)
{
    // Canonical: the high half first, each half big-endian.
    for (int byte = 0; byte < 8; byte++) {
        to[byte] = (uint8_t)(hash.high >> (56 - 8 * byte));
        to[8 + byte] = (uint8_t)(hash.low >> (56 - 8 * byte));
    }
}

// `input` has room for a parent, which lies in it already, and a block.
static PyObject *chain(uint8_t *input, const uint8_t *blocks, Py_ssize_t block_length, Py_ssize_t count)
{
    PyObject *hashes = PyList_New(count);
    if (!hashes) return NULL;
    for (Py_ssize_t i = 0; i < count; i++) {
        memcpy(input + HASH_LENGTH, blocks + i * block_length, block_length);
        write_digest(input, xxh3_128(input, HASH_LENGTH + block_length));
        PyObject *hash = PyBytes_FromStringAndSize((const char *)input, HASH_LENGTH);
        if (!hash) {
            Py_DECREF(hashes);
            return NULL;
        }
        PyList_SET_ITEM(hashes, i, hash);
    }
    return hashes;
}

static PyObject *hash_chain(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer parent, tokens;
    Py_ssize_t block_length, start, stop;
    if (!PyArg_ParseTuple(args, "y*y*nnn", &parent, &tokens, &block_length, &start, &stop)) return NULL;
    PyObject *hashes = NULL;
    uint8_t *input = NULL;
    if (parent.len != HASH_LENGTH)
        PyErr_Format(PyExc_ValueError, "a parent hash has %d bytes, got %zd", HASH_LENGTH, parent.len);
    else if (block_length < 1 || start < 0 || stop < start || stop > tokens.len / block_length)
        PyErr_Format(
            PyExc_ValueError, "no blocks %zd to %zd of %zd bytes in %zd", start, stop, block_length, tokens.len);
    else if (start == stop)
        hashes = PyList_New(0);
    else if (!(input = PyMem_Malloc(HASH_LENGTH + block_length)))
        PyErr_NoMemory();
    else {
        memcpy(input, parent.buf, HASH_LENGTH);
        const uint8_t *blocks = (const uint8_t *)tokens.buf + start * block_length;
        hashes = chain(input, blocks, block_length, stop - start);
    }
    PyMem_Free(input);
    PyBuffer_Release(&parent);
    PyBuffer_Release(&tokens);
    return hashes;
}

static PyMethodDef methods[] = {
    {"pack_into", pack_into, METH_VARARGS, "pack_into(packed, tokens, /)\n--\n\nSee packed_blocks.pyi."},
    {"hash_chain", hash_chain, METH_VARARGS,
     "hash_chain(parent, tokens, block_length, start, stop, /)\n--\n\nSee packed_blocks.pyi."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "kvcore.packed_blocks",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit_packed_blocks(void) { return PyModuleDef_Init(&definition); }
