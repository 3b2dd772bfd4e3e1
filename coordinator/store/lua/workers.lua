-- Returns a row per worker: {info, load, alive, pending, prefills, reserved, decodes, answers}.
local workers = {}
for _, id in ipairs(worker_ids()) do
  local row = redis.call('HMGET', key('node', id), 'info', 'load', 'pending', 'prefills', 'reserved', 'decodes',
    'answers')
  if row[1] then
    local alive = redis.call('EXISTS', key('node', id, 'alive'))
    workers[#workers + 1] = {row[1], row[2], alive, row[3], row[4], row[5], row[6], answers_of(row[7], row[6])}
  end
end
return workers
