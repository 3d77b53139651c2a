// Writes src/openapi.ts, the types of openapi.json.
import { readFile, writeFile } from "node:fs/promises";

import openapiTS, { astToString } from "openapi-typescript";

// Rules about several fields, such as "only one of body and bodyRef". As types they would be unions
// of up to 128 members, which no error message of the compiler could explain. The service checks them.
const RULES = ["allOf", "anyOf", "oneOf", "not"];

function removeRules(value) {
  if (typeof value !== "object" || value === null) {
    return;
  }
  if ("properties" in value) {
    for (const rule of RULES) {
      delete value[rule];
    }
  }
  Object.values(value).forEach(removeRules);
}

const document = JSON.parse(await readFile("openapi.json", "utf8"));
removeRules(document.components.schemas);
const types = await openapiTS(document, {
  defaultNonNullable: false, // a field with a default can be omitted
  emptyObjectsUnknown: true,
});
await writeFile("src/openapi.ts", astToString(types));
