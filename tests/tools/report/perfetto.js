// Asks Perfetto's own trace processor about a trace:
//
//   node perfetto.js FOLDER TRACE QUERY... > one list of rows (objects) a query, as JSON
//
// FOLDER is a build of ui.perfetto.dev, whose worker has it as WebAssembly. It is given here what a
// browser gives a worker, and is spoken to by the messages of perfetto/trace_processor.proto.
const fs = require("fs");
const path = require("path");

const [folder, trace, ...queries] = process.argv.slice(2);
const APPEND = 1, FINALIZE = 2, QUERY = 3;
const [NULL, VARINT, FLOAT, TEXT] = [1, 2, 3, 4];

function varint(value) {
  const bytes = [];
  for (; value > 127; value = Math.floor(value / 128)) bytes.push((value % 128) | 128);
  return Buffer.from([...bytes, value]);
}
const number = (field, value) => Buffer.concat([varint(field * 8), varint(value)]);
function bytes(field, value) {
  return Buffer.concat([varint(field * 8 + 2), varint(value.length), value]);
}

function* varints(buffer) {
  for (let at = 0; at < buffer.length; ) {
    let value = 0n, shift = 0n, byte;
    do {
      byte = buffer[at++];
      value |= BigInt(byte & 127) << shift;
      shift += 7n;
    } while (byte > 127);
    yield [Number(BigInt.asIntN(64, value)), at];
  }
}

// The fields of a message in their order: number and value.
function* fields(buffer) {
  for (let at = 0; at < buffer.length; ) {
    const next = () => {
      const [value, length] = varints(buffer.subarray(at)).next().value;
      at += length;
      return value;
    };
    const key = next(), kind = key % 8;
    const length = kind === 0 ? 0 : kind === 1 ? 8 : kind === 5 ? 4 : next();
    yield [key >> 3, kind === 0 ? next() : buffer.subarray(at, at + length)];
    at += length;
  }
}
const all = (buffer, field) => [...fields(buffer)].filter(([key]) => key === field).map(([, value]) => value);

// The rows of a query, from its replies: cells by kind, in batches.
function rows(results) {
  const columns = results.flatMap(result => all(result, 1)).map(String);
  const cells = results.flatMap(result => all(result, 3)).flatMap(batch => {
    const numbers = all(batch, 2).flatMap(part => [...varints(part)]).map(([value]) => value);
    const floats = Buffer.concat(all(batch, 3));
    const texts = all(batch, 5).flatMap(part => String(part).split("\0"));
    let place = 0;
    return all(batch, 1).flatMap(part => [...varints(part)]).map(([kind]) => {
      if (kind === NULL) return null;
      if (kind === VARINT) return numbers.shift();
      if (kind === FLOAT) return floats.readDoubleLE(8 * place++);
      if (kind === TEXT) return texts.shift();
      throw new Error(`a cell of kind ${kind}`);
    });
  });
  const found = [];
  while (cells.length) found.push(Object.fromEntries(columns.map(name => [name, cells.shift()])));
  return found;
}

const told = [];
const port = {
  postMessage: reply => {
    for (const message of all(Buffer.from(reply), 1)) {
      for (const [field, value] of fields(message)) {
        if (field === 5) throw new Error(String(value));
        if (field === 201 || field === 203) {
          const error = String(all(value, 2));
          if (error) throw new Error(error);
          told.push(value);
        }
      }
    }
  },
};

// What a browser has for a worker, and nothing of node's. Its file is read at once.
class XMLHttpRequest {
  open(_, file) { this.file = file; }
  send() { this.response = fs.readFileSync(path.join(folder, path.basename(this.file))); }
}
const self = { location: { href: "http://localhost/" } };
const silent = { log() {}, warn() {}, error() {} };
const names = ["self", "WorkerGlobalScope", "XMLHttpRequest", "console", "process"];
const source = fs.readFileSync(path.join(folder, "engine_bundle.js"), "utf8");
new Function(...names, source)(self, {}, XMLHttpRequest, silent, undefined);
self.onmessage({ data: port });

let sent = 0;
function send(method, ...more) {
  const request = Buffer.concat([number(1, sent++), number(2, method), ...more]);
  port.onmessage({ data: new Uint8Array(bytes(1, request)) });
}
setImmediate(() => {
  try {
    send(APPEND, bytes(101, fs.readFileSync(trace)));
    send(FINALIZE);
    const answers = queries.map(query => {
      told.length = 0;
      send(QUERY, bytes(103, bytes(1, Buffer.from(query))));
      return rows(told);
    });
    console.log(JSON.stringify(answers));
  } catch (error) {
    console.error(error.message.slice(0, 2000));
    process.exitCode = 1;
  }
});
